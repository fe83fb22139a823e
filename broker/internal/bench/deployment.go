package main

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"flag"
	"fmt"
	"math/big"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/internal/identity"
	"github.com/spillway-dev/spillway/broker/protocol"
	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/lab/binaries"
	"github.com/spillway-dev/spillway/e2e/playground/cluster"
	"github.com/spillway-dev/spillway/e2e/playground/process"
)

// brokerPath compares with another version of the broker.
var brokerPath = flag.String("broker", "", "Path of the broker's program. Built if empty. Only for benchmarks with the broker as a process.")

// deployment is an API server and brokers, each a process of its own.
type deployment struct {
	cluster *cluster.Cluster
	api     client.Client
	dir     string
	program string
	// kubeconfig is what the brokers reach the API server with.
	kubeconfig string

	ca    *x509.Certificate
	caPEM []byte
	caKey *ecdsa.PrivateKey
}

// replica is one broker.
type replica struct {
	*process.Process
	url, probes string
}

// withBroker returns a benchmark of a broker that leads, a process of its own with these
// flags.
func withBroker(timeout time.Duration, measure func(context.Context, *deployment, *replica) error, flags ...string) func() error {
	return func() error {
		ctx, cancel := context.WithTimeout(context.Background(), timeout)
		defer cancel()
		d, err := deploy(ctx)
		if err != nil {
			return err
		}
		defer d.stop()
		r, err := d.replica(ctx, "broker", flags...)
		if err != nil {
			return err
		}
		defer r.Kill()
		if err := poll(ctx, "the broker to lead", r.leads); err != nil {
			return err
		}
		return measure(ctx, d, r)
	}
}

// deploy starts an API server.
func deploy(ctx context.Context) (_ *deployment, err error) {
	ctrl.SetLogger(logr.Discard())
	d := &deployment{}
	defer func() {
		if err != nil {
			d.stop()
		}
	}()
	if d.dir, err = os.MkdirTemp("", "spillway-bench-"); err != nil {
		return nil, err
	}
	if d.program = *brokerPath; d.program == "" {
		d.program = filepath.Join(d.dir, "broker")
		if err := binaries.Own(ctx, controlplane.Log, d.dir, "./broker"); err != nil {
			return nil, err
		}
	}
	if d.cluster, err = controlplane.Run(ctx, "hub", d.dir); err != nil {
		return nil, err
	}
	d.api, d.kubeconfig = d.cluster.Client, d.cluster.Kubeconfig
	return d, d.api.Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: broker.SystemNamespace}})
}

// replica starts a broker, and waits until it serves, as the leader or not.
func (d *deployment) replica(ctx context.Context, name string, flags ...string) (*replica, error) {
	var addresses [2]string
	for i := range addresses {
		port, err := cluster.FreePort()
		if err != nil {
			return nil, err
		}
		addresses[i] = cluster.Address(port)
	}
	started, err := process.Start(process.Spec{
		Name: name, Path: d.program, Dir: d.dir, LogDir: d.dir, Env: []string{"KUBECONFIG=" + d.kubeconfig},
		Args: append([]string{"--namespace=" + broker.SystemNamespace, "--listen=" + addresses[0], "--health-probe-bind-address=" + addresses[1], "--metrics-bind-address=0"}, flags...),
	})
	if err != nil {
		return nil, err
	}
	r := &replica{Process: started, url: "https://" + addresses[0], probes: "http://" + addresses[1]}
	return r, poll(ctx, "broker "+name+" to serve", func() bool { return r.answers("/healthz") })
}

// leads reports whether the broker is ready to serve agents.
func (r *replica) leads() bool { return r.answers("/readyz") }

func (r *replica) answers(path string) bool {
	response, err := (&http.Client{Timeout: time.Second}).Get(r.probes + path)
	if err != nil {
		return false
	}
	defer response.Body.Close()
	return response.StatusCode == http.StatusOK
}

func (d *deployment) stop() {
	if d.cluster != nil {
		d.cluster.Stop(10 * time.Second)
	}
	_ = os.RemoveAll(d.dir)
}

// member is a cluster's identity.
type member struct {
	ID        string `json:"id"`
	Cert, Key []byte
}

// register makes a cluster known to the brokers as if it had joined, which is limited in
// rate.
func (d *deployment) register(ctx context.Context, id string) (member, error) {
	if d.ca == nil {
		if err := d.loadCA(ctx); err != nil {
			return member{}, err
		}
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return member{}, err
	}
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 100))
	if err != nil {
		return member{}, err
	}
	template := &x509.Certificate{
		SerialNumber: serial, Subject: pkix.Name{CommonName: id}, NotBefore: time.Now().Add(-time.Minute), NotAfter: time.Now().Add(24 * time.Hour),
		URIs:     []*url.URL{{Scheme: "spiffe", Host: "spillway", Path: "/cluster/" + id}},
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}, BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, d.ca, key.Public(), d.caKey)
	if err != nil {
		return member{}, err
	}
	leaf, err := x509.ParseCertificate(der)
	if err != nil {
		return member{}, err
	}
	private, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return member{}, err
	}
	registration := &broker.ClusterRegistration{ObjectMeta: metav1.ObjectMeta{Namespace: broker.SystemNamespace, Name: id}, Spec: broker.ClusterRegistrationSpec{ClusterID: id}}
	if err := d.api.Create(ctx, registration); err != nil {
		return member{}, err
	}
	before := registration.DeepCopy()
	registration.Status = broker.ClusterRegistrationStatus{Phase: broker.RegistrationApproved, KeyFingerprint: protocol.KeyFingerprint(leaf.RawSubjectPublicKeyInfo)}
	// A controller adds a finalizer meanwhile.
	if err := d.api.Status().Patch(ctx, registration, client.MergeFrom(before)); err != nil {
		return member{}, err
	}
	return member{ID: id, Cert: pemOf("CERTIFICATE", der), Key: pemOf("PRIVATE KEY", private)}, nil
}

func pemOf(kind string, der []byte) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der})
}

// loadCA reads the authority that the first broker has created.
func (d *deployment) loadCA(ctx context.Context) error {
	secret := &corev1.Secret{}
	if err := d.api.Get(ctx, client.ObjectKey{Namespace: broker.SystemNamespace, Name: identity.CAName}, secret); err != nil {
		return err
	}
	pair, err := tls.X509KeyPair(secret.Data[corev1.TLSCertKey], secret.Data[corev1.TLSPrivateKeyKey])
	if err != nil {
		return err
	}
	key, isECDSA := pair.PrivateKey.(*ecdsa.PrivateKey)
	if !isECDSA {
		return errors.New("the authority's key is not ECDSA")
	}
	d.ca, d.caPEM, d.caKey = pair.Leaf, secret.Data[corev1.TLSCertKey], key
	return nil
}

// dial is the member's client of a broker.
func (m member) dial(url string, ca []byte) (*protocol.Client, error) {
	pair, err := tls.X509KeyPair(m.Cert, m.Key)
	if err != nil {
		return nil, err
	}
	config, err := protocol.TLSConfig(ca, func() (*tls.Certificate, error) { return &pair, nil })
	if err != nil {
		return nil, err
	}
	return protocol.NewClient(url, config, logr.Discard())
}

// poll waits until ok.
func poll(ctx context.Context, what string, ok func() bool) error {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	for !ok() {
		select {
		case <-ctx.Done():
			return fmt.Errorf("waiting for %s: %w", what, ctx.Err())
		case <-time.After(20 * time.Millisecond):
		}
	}
	return nil
}
