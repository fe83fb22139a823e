package kubelet

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"time"
)

// answerWithin is how long the provider may take to begin its answer.
const answerWithin = 30 * time.Second

// logQueries are the parameters of a kubelet's containerLogs, which are also those
// of a pod's log. The provider checks their values.
var logQueries = []string{
	"follow", "previous", "timestamps", "sinceSeconds", "sinceTime", "tailLines", "limitBytes", "stream", "insecureSkipTLSVerifyBackend",
}

// logs sends a container's log, each piece as it comes.
func (a *api) logs(w http.ResponseWriter, r *http.Request) {
	g, ok := a.locate(w, r)
	if !ok {
		return
	}
	request := g.at(http.MethodGet, "log").Param("container", r.PathValue("container"))
	asked := r.URL.Query()
	for _, key := range logQueries {
		if value := asked.Get(key); value != "" {
			request.Param(key, value)
		}
	}

	ctx, cancel := context.WithCancelCause(r.Context())
	defer cancel(nil)
	late := time.AfterFunc(answerWithin, func() { cancel(context.DeadlineExceeded) })
	lines, err := request.Stream(ctx)
	late.Stop()
	if err != nil {
		if context.Cause(ctx) == context.DeadlineExceeded {
			err = fmt.Errorf("%w (%s)", context.DeadlineExceeded, answerWithin)
		}
		answerProblem(w, g.homeNames(err))
		return
	}
	defer lines.Close()

	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.WriteHeader(http.StatusOK)
	out := flushing{w: w, control: http.NewResponseController(w)}
	// Who follows a silent container should learn at once that he is connected.
	_ = out.control.Flush()
	if _, err := io.Copy(out, lines); err != nil && r.Context().Err() == nil {
		a.log.Info("A log from the provider broke off", "Namespace", g.homeNamespace, "Pod", g.homePod, "Error", err.Error())
		// The header is out, so only a broken connection still says that the log is not whole.
		panic(http.ErrAbortHandler)
	}
}

// flushing passes each write on at once.
type flushing struct {
	w       io.Writer
	control *http.ResponseController
}

func (f flushing) Write(p []byte) (int, error) {
	n, err := f.w.Write(p)
	if err != nil {
		return n, err
	}
	return n, f.control.Flush()
}
