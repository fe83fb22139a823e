package kubelet

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"time"
)

// responseTimeout bounds the time to the beginning of the provider's response.
const responseTimeout = 30 * time.Second

// logParameters are the query parameters of a kubelet's containerLogs, which are
// those of a pod's log. The provider validates the values.
var logParameters = []string{
	"follow", "previous", "timestamps", "sinceSeconds", "sinceTime", "tailLines", "limitBytes", "stream", "insecureSkipTLSVerifyBackend",
}

// logs streams the log of a guest's container.
func (a *api) logs(w http.ResponseWriter, r *http.Request) {
	g, ok := a.locate(w, r)
	if !ok {
		return
	}
	request := g.request(http.MethodGet, "log").Param("container", r.PathValue("container"))
	query := r.URL.Query()
	for _, key := range logParameters {
		if value := query.Get(key); value != "" {
			request.Param(key, value)
		}
	}

	ctx, cancel := context.WithCancelCause(r.Context())
	defer cancel(nil)
	timeout := time.AfterFunc(responseTimeout, func() { cancel(context.DeadlineExceeded) })
	stream, err := request.Stream(ctx)
	timeout.Stop()
	if err != nil {
		if context.Cause(ctx) == context.DeadlineExceeded {
			err = fmt.Errorf("%w (%s)", context.DeadlineExceeded, responseTimeout)
		}
		writeError(w, g.withPodName(err))
		return
	}
	defer stream.Close()

	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.WriteHeader(http.StatusOK)
	out := flushWriter{w: w, control: http.NewResponseController(w)}
	// The header is sent before the first line: a container may log nothing for long.
	_ = out.control.Flush()
	if _, err := io.Copy(out, stream); err != nil && r.Context().Err() == nil {
		a.log.Info("Log stream from the provider was interrupted", "namespace", g.podNamespace, "pod", g.podName, "reason", err.Error())
		// The header was sent: only a broken connection shows that the log is incomplete.
		panic(http.ErrAbortHandler)
	}
}

// flushWriter flushes after each write.
type flushWriter struct {
	w       io.Writer
	control *http.ResponseController
}

func (f flushWriter) Write(p []byte) (int, error) {
	n, err := f.w.Write(p)
	if err != nil {
		return n, err
	}
	return n, f.control.Flush()
}
