package controller

import (
	"io"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/spillway-dev/spillway/e2e/expect"
)

// endless sends zeros until the client closes the connection.
func endless(w http.ResponseWriter, _ *http.Request) {
	chunk := make([]byte, 1<<20)
	for {
		if _, err := w.Write(chunk); err != nil {
			return
		}
	}
}

// A hostile provider cannot make the program read a list without end.
func TestEndlessListIsBounded(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(endless))
	defer server.Close()
	client := &http.Client{Transport: newBounded(http.DefaultTransport)}
	response, err := client.Get(server.URL + "/api/v1/namespaces/spillway-guests-rome/pods")
	expect.NoError(t, err)
	defer response.Body.Close()
	n, err := io.Copy(io.Discard, response.Body)
	if err == nil || n != maxBody {
		t.Errorf("read %d bytes, %v; want an error after %d", n, err, maxBody)
	}
}

// A list that always has another page ends as well.
func TestEndlessPagesAreBounded(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	defer server.Close()
	client := &http.Client{Transport: newBounded(http.DefaultTransport)}
	pages := func() (n int) {
		for url := server.URL + "/api/v1/namespaces/x/pods?limit=500"; n < 2*maxPages; n++ {
			response, err := client.Get(url)
			if err != nil {
				break
			}
			response.Body.Close()
			url = server.URL + "/api/v1/namespaces/x/pods?limit=500&continue=more"
		}
		return n
	}
	// The next list begins with its first page.
	if first, second := pages(), pages(); first != maxPages || second != maxPages {
		t.Errorf("lists of %d and %d pages, want %d", first, second, maxPages)
	}
}

func TestDeclaredSizeIsBounded(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Length", "99999999999")
		w.WriteHeader(http.StatusOK)
	}))
	defer server.Close()
	client := &http.Client{Transport: newBounded(http.DefaultTransport)}
	if response, err := client.Get(server.URL + "/api/v1/namespaces/x/pods"); err == nil {
		response.Body.Close()
		t.Error("an answer of 100 GB is read")
	}
}

func TestLimits(t *testing.T) {
	for path, want := range map[string]int64{
		"/api/v1/namespaces/x/pods":                      maxBody,
		"/api/v1/namespaces/x/pods?watch=true":           maxWatch,
		"/api/v1/namespaces/x/pods?watch=1":              maxWatch,
		"/api/v1/namespaces/x/pods/web/log?follow=true":  0,
		"/api/v1/namespaces/x/pods/web/exec?command=sh":  0,
		"/api/v1/namespaces/x/pods/web/portforward":      0,
		"/api/v1/namespaces/x/pods/web/log/../../../etc": maxBody,
	} {
		if got := limitOf(httptest.NewRequest(http.MethodGet, path, nil)); got != want {
			t.Errorf("%s: want %d, got %d", path, want, got)
		}
	}
}
