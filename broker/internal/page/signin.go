package page

import (
	"context"
	"crypto/sha256"
	"errors"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/spillway-dev/spillway/broker/internal/page/session"
	"github.com/spillway-dev/spillway/broker/text"
)

// signInView is the form.
type signInView struct {
	Next, Problem, Namespace string
}

// cookieName is that of the session's cookie: with TLS, one that no other host or path can set. It has
// the port, which cookies ignore: forwarded ports of two hubs have one host.
func (p *Page) cookieName(r *http.Request) string {
	name := "spillway-page"
	if p.Secure != nil {
		name = "__Host-" + name
	}
	if _, port, err := net.SplitHostPort(r.Host); err == nil {
		if number, err := strconv.ParseUint(port, 10, 16); err == nil {
			name += "-" + strconv.FormatUint(number, 10)
		}
	}
	return name
}

// setCookie sets the cookie, or removes it if the name is empty.
func (p *Page) setCookie(w http.ResponseWriter, r *http.Request, name string) {
	cookie := &http.Cookie{Name: p.cookieName(r), Value: name, Path: "/", HttpOnly: true, SameSite: http.SameSiteStrictMode, Secure: p.Secure != nil}
	if name == "" {
		cookie.MaxAge = -1
	}
	http.SetCookie(w, cookie)
}

// local returns the path and query to go to after signing in: of this page, or its first.
func local(next string) string {
	to, err := url.Parse(next)
	if err != nil || to.Scheme != "" || to.Host != "" || to.User != nil || !strings.HasPrefix(to.Path, "/") || strings.HasPrefix(to.Path, "//") || strings.Contains(next, `\`) {
		return "/clusters"
	}
	return (&url.URL{Path: to.Path, RawQuery: to.RawQuery}).RequestURI()
}

func (p *Page) signInForm(w http.ResponseWriter, r *http.Request) {
	p.askForToken(w, http.StatusOK, r.URL.Query().Get("next"), "")
}

func (p *Page) askForToken(w http.ResponseWriter, status int, next, problem string) {
	p.write(w, status, "sign-in", shown{Title: "Sign in", At: p.Clock.Now().UTC(), View: signInView{local(next), problem, p.Namespace}})
}

func (p *Page) signIn(w http.ResponseWriter, r *http.Request) {
	if p.refusesStandby(w) {
		return
	}
	if err := r.ParseForm(); err != nil {
		p.askForToken(w, http.StatusBadRequest, "", "The form could not be read: "+text.Line(err.Error(), 200))
		return
	}
	next, token := r.PostForm.Get("next"), strings.TrimSpace(r.PostForm.Get("token"))
	if token == "" {
		p.askForToken(w, http.StatusBadRequest, next, "Paste a token.")
		return
	}
	// Behind an Ingress, all have one address: who guesses must not keep others from signing in.
	if wait := p.signIns.Take(addressOf(r)+" "+hashed(token), 1); wait > 0 {
		w.Header().Set("Retry-After", "2")
		p.askForToken(w, http.StatusTooManyRequests, next, "Too many attempts. Try again in a few seconds.")
		return
	}
	ctx, cancel := context.WithTimeout(r.Context(), 5*time.Second)
	defer cancel()
	select {
	case p.reviewing <- struct{}{}:
	case <-ctx.Done():
		w.Header().Set("Retry-After", "2")
		p.askForToken(w, http.StatusServiceUnavailable, next, "Too many sign in at the same time. Try again in a few seconds.")
		return
	}
	name, user, err := p.Sessions.Open(ctx, token)
	<-p.reviewing
	switch {
	case errors.Is(err, session.ErrToken):
		p.Log.Info("Refused to sign in", "address", addressOf(r))
		p.askForToken(w, http.StatusUnauthorized, next, "The hub does not accept this token: it may have expired, or be another cluster's.")
	case err != nil:
		p.Log.Info("Cannot ask the API server about a token", "reason", err.Error())
		p.askForToken(w, http.StatusServiceUnavailable, next, "The API server of the hub did not answer. Try again in a few seconds.")
	case !user.Clusters && !user.Reservations:
		p.Log.Info("Refused to sign in", "user", text.Line(user.Name, 200), "address", addressOf(r))
		p.askForToken(w, http.StatusForbidden, next, user.Name+" may list neither ClusterAdvertisements nor Reservations in namespace "+p.Namespace+". An administrator of the hub can bind Role spillway-broker-page to them.")
	default:
		p.Log.Info("Signed in", "user", text.Line(user.Name, 200), "address", addressOf(r))
		if cookie, err := r.Cookie(p.cookieName(r)); err == nil {
			p.Sessions.Close(cookie.Value) // the one before
		}
		p.setCookie(w, r, name)
		http.Redirect(w, r, local(next), http.StatusSeeOther)
	}
}

func (p *Page) signOut(w http.ResponseWriter, r *http.Request) {
	if cookie, err := r.Cookie(p.cookieName(r)); err == nil {
		p.Sessions.Close(cookie.Value)
	}
	p.setCookie(w, r, "")
	http.Redirect(w, r, "/sign-in", http.StatusSeeOther)
}

// hashed is a secret as a key of a limit.
func hashed(secret string) string {
	hash := sha256.Sum256([]byte(secret))
	return string(hash[:])
}

// addressOf is the address of a caller without its port.
func addressOf(r *http.Request) string { return hostOf(r.RemoteAddr) }
