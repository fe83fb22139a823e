package identity

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/clock"
)

// reloadAfter is for how long files that were read are used: a mounted Secret changes within a
// minute or so.
const reloadAfter = 10 * time.Second

// files are the serving certificate and the CA of clients, in a directory that another program
// keeps: such as a Secret of cert-manager. They are read again for new connections.
type files struct {
	dir   string
	clock clock.PassiveClock
	log   logr.Logger

	mutex   sync.Mutex
	readAt  time.Time
	serving *tls.Certificate
	clients *x509.CertPool
}

// tlsConfig is the configuration of the listener. Each connection has the files as they are then.
func (f *files) tlsConfig() *tls.Config {
	return &tls.Config{
		MinVersion: tls.VersionTLS12,
		GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) {
			serving, clients := f.current()
			config := serverConfig(f.clock)
			config.ClientCAs, config.Certificates = clients, []tls.Certificate{*serving}
			return config, nil
		},
	}
}

// current are the files as read last: those that cannot be used are not.
func (f *files) current() (*tls.Certificate, *x509.CertPool) {
	f.mutex.Lock()
	defer f.mutex.Unlock()
	if f.clock.Since(f.readAt) >= reloadAfter {
		if err := f.read(); err != nil {
			f.log.Error(err, "Failed to read the certificates again; the earlier ones are used", "directory", f.dir)
		}
	}
	return f.serving, f.clients
}

// load reads the files for the first time.
func (f *files) load() error {
	f.mutex.Lock()
	defer f.mutex.Unlock()
	return f.read()
}

func (f *files) read() error {
	f.readAt = f.clock.Now()
	path := func(name string) string { return filepath.Join(f.dir, name) }
	pair, err := tls.LoadX509KeyPair(path(corev1.TLSCertKey), path(corev1.TLSPrivateKeyKey))
	if err != nil {
		return fmt.Errorf("reading --tls-cert-path: %w", err)
	}
	bundle, err := os.ReadFile(path(corev1.ServiceAccountRootCAKey))
	if err != nil {
		return fmt.Errorf("reading --tls-cert-path: %w", err)
	}
	clients := x509.NewCertPool()
	if !clients.AppendCertsFromPEM(bundle) {
		return errors.New("reading --tls-cert-path: ca.crt has no certificate in PEM")
	}
	f.serving, f.clients = &pair, clients
	certificateExpiry.WithLabelValues("serving").Set(float64(pair.Leaf.NotAfter.Unix()))
	return nil
}
