package kubelet

import (
	"bufio"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"testing"
	"time"

	"k8s.io/client-go/rest"
	"k8s.io/utils/clock"
)

const logPath = "/containerLogs/" + homeSpace + "/" + homePod + "/c"

func TestLogsCarryEveryOption(t *testing.T) {
	t.Parallel()
	guests := &oneGuest{}
	asked := make(chan *http.Request, 1)
	guests.config = played(t, func(w http.ResponseWriter, r *http.Request) {
		asked <- r
		fmt.Fprint(w, "one line\n")
	})
	server := serve(t, guests, nil, clock.RealClock{})
	options := url.Values{
		"tailLines": {"0"}, "limitBytes": {"7"}, "timestamps": {"true"}, "previous": {"true"},
		"sinceSeconds": {"9"}, "sinceTime": {"2026-01-01T00:00:00Z"}, "follow": {"true"}, "stream": {"Stdout"},
	}
	code, body := get(t, server.URL+logPath+"?"+options.Encode()+"&pretty=%2F..%2Fsecrets")
	if code != http.StatusOK || body != "one line\n" {
		t.Fatalf("got %d %q", code, body)
	}
	request := <-asked
	if want := "/api/v1/namespaces/" + guestSpace + "/pods/" + guestPod + "/log"; request.URL.Path != want {
		t.Errorf("the provider was asked for %s, want %s", request.URL.Path, want)
	}
	options.Set("container", "c")
	if got := request.URL.Query(); got.Encode() != options.Encode() {
		t.Errorf("the provider was asked with %v, want %v", got, options)
	}
}

// Who follows sees a line when it is written, and the provider learns when he leaves.
func TestLogsFollow(t *testing.T) {
	t.Parallel()
	guests := &oneGuest{}
	write, left := make(chan string), make(chan struct{})
	guests.config = played(t, func(w http.ResponseWriter, r *http.Request) {
		defer close(left)
		control := http.NewResponseController(w)
		for {
			// The error of a flush is that the other side left, which comes as Done.
			_ = control.Flush()
			select {
			case line := <-write:
				fmt.Fprintln(w, line)
			case <-r.Context().Done():
				return
			}
		}
	})
	server := serve(t, guests, nil, clock.RealClock{})
	answer, err := anyClient().Get(server.URL + logPath + "?follow=true")
	if err != nil {
		t.Fatal(err)
	}
	defer answer.Body.Close()
	lines := bufio.NewScanner(answer.Body)
	for _, line := range []string{"first", "second"} {
		write <- line
		read := make(chan string, 1)
		go func() { lines.Scan(); read <- lines.Text() }()
		select {
		case got := <-read:
			if got != line {
				t.Fatalf("got %q, want %q", got, line)
			}
		case <-time.After(20 * time.Second):
			t.Fatalf("%q was written and did not arrive", line)
		}
	}
	answer.Body.Close()
	select {
	case <-left:
	case <-time.After(20 * time.Second):
		t.Fatal("the provider goes on sending to nobody")
	}
}

// A log that broke off must not look like one that ended.
func TestLogsThatBreakOff(t *testing.T) {
	t.Parallel()
	guests := &oneGuest{}
	guests.config = played(t, func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprint(w, "half")
		_ = http.NewResponseController(w).Flush()
		panic(http.ErrAbortHandler)
	})
	server := serve(t, guests, nil, clock.RealClock{})
	answer, err := anyClient().Get(server.URL + logPath)
	if err != nil {
		t.Fatal(err)
	}
	defer answer.Body.Close()
	lines := bufio.NewScanner(answer.Body)
	for lines.Scan() {
	}
	if lines.Err() == nil {
		t.Error("the log ended as if it were whole")
	}
}

func TestProblemsInWords(t *testing.T) {
	t.Parallel()
	status := func(code int, reason, message string) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "application/json")
			w.WriteHeader(code)
			fmt.Fprintf(w, `{"kind":"Status","apiVersion":"v1","status":"Failure","code":%d,"reason":%q,"message":%q}`, code, reason, message)
		}
	}
	for name, c := range map[string]struct {
		path     string
		provider http.HandlerFunc
		err      error
		want     int
		words    string
	}{
		"NoSuchPod":    {"/containerLogs/work/other/c", nil, nil, http.StatusNotFound, "pod work/other does not run on virtual node spillway-paris"},
		"NoSuchToExec": {"/exec/work/other/c?output=1&command=id", nil, nil, http.StatusNotFound, "work/other"},
		"NoSuchPort":   {"/portForward/work/other", nil, nil, http.StatusNotFound, "work/other"},
		"NoLink":       {logPath, nil, errors.New("the link is ending"), http.StatusServiceUnavailable, "the link is ending"},
		"Unreachable":  {logPath, nil, nil, http.StatusServiceUnavailable, "cannot be reached"},
		"Refused":      {logPath, status(401, "Unauthorized", "Unauthorized"), nil, http.StatusBadGateway, "refuses the virtual node"},
		"NotAllowed":   {logPath, status(403, "Forbidden", "no pods/log"), nil, http.StatusBadGateway, "no pods/log"},
		"Waiting": {
			logPath, status(400, "BadRequest", `container "c" in pod "`+guestPod+`" is waiting to start: ContainerCreating`), nil,
			http.StatusBadRequest, `container "c" in pod "job" is waiting to start`,
		},
		"GuestGone": {logPath, status(404, "NotFound", `pods "`+guestPod+`" not found`), nil, http.StatusNotFound, `pods "job" not found`},
		"Broken":    {logPath, status(500, "InternalError", "kubelet down"), nil, http.StatusBadGateway, "kubelet down"},
	} {
		t.Run(name, func(t *testing.T) {
			guests := &oneGuest{}
			guests.lead(&rest.Config{Host: "https://127.0.0.1:1"}, c.err)
			if c.provider != nil {
				guests.lead(played(t, c.provider), nil)
			}
			server := serve(t, guests, nil, clock.RealClock{})
			if code, body := get(t, server.URL+c.path); code != c.want || !strings.Contains(body, c.words) || strings.Contains(body, "secret-token") {
				t.Errorf("got %d %q, want %d with %q", code, body, c.want, c.words)
			}
		})
	}
}
