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
	// maxWatch is what one watch may send before it is closed and begun again.
	maxWatch = 256 << 20
	// maxPages is the number of pages of one list.
	maxPages = 200
)

// bounded limits the size of a provider's answers.
type bounded struct {
	next http.RoundTripper

	mu sync.Mutex
	// pages counts the pages of the last list of each path.
	pages map[string]int
}

func newBounded(next http.RoundTripper) *bounded {
	return &bounded{next: next, pages: map[string]int{}}
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
	response, err := b.next.RoundTrip(request)
	if err != nil {
		return nil, err
	}
	if limit := limitOf(request); limit > 0 && response.Body != nil {
		if response.ContentLength > limit {
			response.Body.Close()
			return nil, fmt.Errorf("the provider's answer to %s %s has %d bytes, more than %d", request.Method, request.URL.Path, response.ContentLength, limit)
		}
		response.Body = &boundedBody{ReadCloser: response.Body, left: limit, path: request.URL.Path}
	}
	return response, nil
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
	return n, err
}
