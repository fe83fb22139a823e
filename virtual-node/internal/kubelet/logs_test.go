package kubelet

import (
	"bufio"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"testing"
	"time"

	"k8s.io/client-go/rest"
	"k8s.io/utils/clock"

	"github.com/spillway-dev/spillway/e2e/expect"
)

const logPath = "/containerLogs/" + podNamespace + "/" + podName + "/c"

func TestLogsForwardAllParameters(t *testing.T) {
	t.Parallel()
	guests := &fakeGuests{}
	requests := make(chan *http.Request, 1)
	guests.config = fakeProvider(t, func(w http.ResponseWriter, r *http.Request) {
		requests <- r
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
	request := <-requests
	if want := "/api/v1/namespaces/" + guestNamespace + "/pods/" + guestName + "/log"; request.URL.Path != want {
		t.Errorf("got a request for %s, want %s", request.URL.Path, want)
	}
	options.Set("container", "c")
	if got := request.URL.Query(); got.Encode() != options.Encode() {
		t.Errorf("got parameters %v, want %v", got, options)
	}
}

// A following client receives each line when it is written; its disconnect ends the
// request to the provider.
func TestLogsFollow(t *testing.T) {
	t.Parallel()
	guests := &fakeGuests{}
	write, disconnected := make(chan string), make(chan struct{})
	guests.config = fakeProvider(t, func(w http.ResponseWriter, r *http.Request) {
		defer close(disconnected)
		control := http.NewResponseController(w)
		for {
			// An error means that the client disconnected, which ends the context.
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
	response, err := insecureClient().Get(server.URL + logPath + "?follow=true")
	expect.NoError(t, err)
	defer response.Body.Close()
	lines := bufio.NewScanner(response.Body)
	for _, line := range []string{"first", "second"} {
		write <- line
		read := make(chan string, 1)
		go func() { lines.Scan(); read <- lines.Text() }()
		select {
		case got := <-read:
			if got != line {
				t.Fatalf("got %q, want %q", got, line)
			}
		case <-time.After(expect.Deadline):
			t.Fatalf("%q did not arrive", line)
		}
	}
	response.Body.Close()
	select {
	case <-disconnected:
	case <-time.After(expect.Deadline):
		t.Fatal("the request to the provider did not end")
	}
}

// A client must be able to tell an interrupted log from a complete one.
func TestLogsInterrupted(t *testing.T) {
	t.Parallel()
	guests := &fakeGuests{}
	guests.config = fakeProvider(t, func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprint(w, "half")
		_ = http.NewResponseController(w).Flush()
		panic(http.ErrAbortHandler)
	})
	server := serve(t, guests, nil, clock.RealClock{})
	response, err := insecureClient().Get(server.URL + logPath)
	expect.NoError(t, err)
	defer response.Body.Close()
	lines := bufio.NewScanner(response.Body)
	for lines.Scan() {
	}
	if lines.Err() == nil {
		t.Error("the interrupted log ended without an error")
	}
}

func TestErrorResponses(t *testing.T) {
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
		want     int
		message  string
	}{
		"NoSuchPod":        {"/containerLogs/work/other/c", nil, http.StatusNotFound, "pod work/other is not on virtual node spillway-paris"},
		"NoSuchPodExec":    {"/exec/work/other/c?output=1&command=id", nil, http.StatusNotFound, "work/other"},
		"NoSuchPodForward": {"/portForward/work/other", nil, http.StatusNotFound, "work/other"},
		"Unreachable":      {logPath, nil, http.StatusServiceUnavailable, "unreachable"},
		"Refused":          {logPath, status(401, "Unauthorized", "Unauthorized"), http.StatusBadGateway, "refused access"},
		"NotAllowed":       {logPath, status(403, "Forbidden", "no pods/log"), http.StatusBadGateway, "no pods/log"},
		"Waiting": {
			logPath, status(400, "BadRequest", `container "c" in pod "`+guestName+`" is waiting to start: ContainerCreating`),
			http.StatusBadRequest, `container "c" in pod "job" is waiting to start`,
		},
		"GuestGone": {logPath, status(404, "NotFound", `pods "`+guestName+`" not found`), http.StatusNotFound, `pods "job" not found`},
		"Broken":    {logPath, status(500, "InternalError", "kubelet down"), http.StatusBadGateway, "kubelet down"},
	} {
		t.Run(name, func(t *testing.T) {
			guests := &fakeGuests{}
			guests.setConfig(&rest.Config{Host: "https://127.0.0.1:1"})
			if c.provider != nil {
				guests.setConfig(fakeProvider(t, c.provider))
			}
			server := serve(t, guests, nil, clock.RealClock{})
			if code, body := get(t, server.URL+c.path); code != c.want || !strings.Contains(body, c.message) || strings.Contains(body, "secret-token") {
				t.Errorf("got %d %q, want %d with %q", code, body, c.want, c.message)
			}
		})
	}
}

func TestInvalidProviderConfig(t *testing.T) {
	t.Parallel()
	server := serve(t, &fakeGuests{config: &rest.Config{Host: "://"}}, nil, clock.RealClock{})
	if code, body := get(t, server.URL+logPath); code != http.StatusServiceUnavailable || !strings.Contains(body, errInvalidConfig.Error()) {
		t.Errorf("got %d %q, want 503 with %q", code, body, errInvalidConfig)
	}
}
