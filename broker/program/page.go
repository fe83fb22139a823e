package program

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"path/filepath"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/clock"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/certwatcher"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/manager"

	"github.com/spillway-dev/spillway/broker/internal/page"
	"github.com/spillway-dev/spillway/broker/internal/page/session"
	"github.com/spillway-dev/spillway/broker/internal/server"
)

// certificate is one in files, followed as they change.
type certificate struct{ *certwatcher.CertWatcher }

// Start follows the files. If it cannot, the page keeps the certificate that it has.
func (c certificate) Start(ctx context.Context) error {
	if err := c.CertWatcher.Start(ctx); err != nil {
		ctrl.Log.Error(err, "Failed to follow the certificate of the page: a new one is served when the broker starts again")
	}
	return nil
}

// addPage adds the page for people, and returns its address.
func addPage(mgr manager.Manager, o Options, live client.Client, rest *server.Server, identity Identity, kept *History) (net.Addr, error) {
	listener, err := net.Listen("tcp", o.Page)
	if err != nil {
		return nil, fmt.Errorf("listening: %w", err)
	}
	options := page.Options{
		Listener: listener, Namespace: o.Namespace, Store: rest.Store, Clock: clock.RealClock{}, Log: ctrl.Log.WithName("page"),
		Sessions: session.New(session.Reviewer{Client: live, Namespace: o.Namespace}.Review, clock.RealClock{}),
		Ready:    func() error { return rest.Ready(nil) },
	}
	if kept != nil {
		options.History, options.Reference = kept.Database, kept.Reference
	}
	// Only who is on this machine, such as kubectl port-forward, reaches a loopback address.
	if address, ok := listener.Addr().(*net.TCPAddr); !ok || !address.IP.IsLoopback() {
		options.Secure = identity.TLSConfig()
	}
	if options.Secure != nil && o.PageCertPath != "" {
		files, err := certwatcher.New(filepath.Join(o.PageCertPath, corev1.TLSCertKey), filepath.Join(o.PageCertPath, corev1.TLSPrivateKeyKey))
		if err == nil {
			err = mgr.Add(certificate{files})
		}
		if err != nil {
			return nil, errors.Join(fmt.Errorf("reading --page-cert-path: %w", err), listener.Close())
		}
		options.Secure = &tls.Config{MinVersion: tls.VersionTLS12, GetCertificate: files.GetCertificate}
	}
	return listener.Addr(), mgr.Add(page.New(options))
}
