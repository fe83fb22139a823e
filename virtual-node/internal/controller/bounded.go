package controller

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
)

// Bounds on what a provider can make this program read: a provider is not trusted, and
// the program serves the pods of all providers.
const (
	// maxBody is the size of one answer that is not a stream. A list of 20,000 guests of
	// 3 KiB each is smaller.
	maxBody = 64 << 20
	// maxWatch is what the watches of one path may send until it is listed again: a cache
	// keeps each object that it is sent, and forgets those that are gone with a list.
	maxWatch = 256 << 20
	// maxPages is the number of pages of one list.
	maxPages = 200
	// maxError is the size of an answer that is an error, which users, logs and statuses
	// repeat, also in place of a stream.
	maxError = 256 << 10
)

// bounded limits the size of a provider's answers.
type bounded struct {
	next http.RoundTripper

	mu sync.Mutex
	// pages counts the pages of the last list of each path, and watched the bytes that
	// watches of it have sent since.
	pages   map[string]int
	watched map[string]int64
}

func newBounded(next http.RoundTripper) *bounded {
	return &bounded{next: next, pages: map[string]int{}, watched: map[string]int64{}}
}

// countPage counts the pages of lists and reports whether one may go on.
func (b *bounded) countPage(request *http.Request) bool {
	query := request.URL.Query()
	next, first := query.Has("continue"), query.Has("limit")
	if !next && !first {
		return true
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if !next {
		delete(b.pages, request.URL.Path)
		return true
	}
	b.pages[request.URL.Path]++
	return b.pages[request.URL.Path] < maxPages
}

func (b *bounded) RoundTrip(request *http.Request) (*http.Response, error) {
	if !b.countPage(request) {
		return nil, fmt.Errorf("the provider's list of %s does not end after %d pages", request.URL.Path, maxPages)
	}
	limit, read, err := b.limit(request)
	if err != nil {
		return nil, err
	}
	response, err := b.next.RoundTrip(request)
	if err != nil {
		return nil, err
	}
	if response.StatusCode >= 300 && response.StatusCode < 400 && response.Header.Get("Location") != "" {
		// It would be followed from within this cluster, to whatever is reachable there.
		response.Body.Close()
		return nil, fmt.Errorf("the provider's answer to %s %s refers to another address, which is not followed", request.Method, request.URL.Path)
	}
	if response.StatusCode >= http.StatusBadRequest {
		limit, read = maxError, nil
	}
	if limit > 0 && response.Body != nil {
		if response.ContentLength > limit {
			response.Body.Close()
			return nil, fmt.Errorf("the provider's answer to %s %s has %d bytes, more than %d", request.Method, request.URL.Path, response.ContentLength, limit)
		}
		response.Body = &boundedBody{ReadCloser: response.Body, left: limit, path: request.URL.Path, read: read}
	}
	return response, nil
}

// limit returns the limit for the answer to a request, 0 for none, and what counts the bytes
// that are read of it.
func (b *bounded) limit(request *http.Request) (limit int64, read func(n int), err error) {
	path := request.URL.Path
	limit = limitOf(request)
	b.mu.Lock()
	defer b.mu.Unlock()
	if request.Method == http.MethodGet && (limit < maxWatch || request.URL.Query().Get("sendInitialEvents") == "true") {
		// It lists what there is.
		delete(b.watched, path)
	}
	if limit < maxWatch {
		return limit, nil, nil
	}
	if limit -= b.watched[path]; limit <= 0 {
		return 0, nil, fmt.Errorf("the provider has reported changes of %s of %d bytes: it is listed again", path, b.watched[path])
	}
	return limit, func(n int) {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.watched[path] += int64(n)
	}, nil
}

// limitOf is the limit for the answer to a request, 0 for none: logs, exec, attach and
// port-forward are streams that the user reads.
func limitOf(request *http.Request) int64 {
	for _, stream := range []string{"/log", "/exec", "/attach", "/portforward"} {
		if strings.HasSuffix(request.URL.Path, stream) {
			return 0
		}
	}
	if watch := request.URL.Query().Get("watch"); watch == "true" || watch == "1" {
		return maxWatch
	}
	return maxBody
}

// boundedBody fails once more than left bytes were read.
type boundedBody struct {
	io.ReadCloser
	left int64
	path string
	// read is called with the number of bytes of each read; nil for none.
	read func(n int)
}

func (b *boundedBody) Read(p []byte) (int, error) {
	if b.left <= 0 {
		return 0, fmt.Errorf("the provider's answer to %s is too large", b.path)
	}
	if int64(len(p)) > b.left {
		p = p[:b.left]
	}
	n, err := b.ReadCloser.Read(p)
	b.left -= int64(n)
	if b.read != nil {
		b.read(n)
	}
	return n, err
}
