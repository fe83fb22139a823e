package controlplane

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"k8s.io/client-go/rest"

	"github.com/spillway-dev/spillway/e2e/playground/cluster"
)

// server is an API server that tests use one after the other.
type server struct {
	cluster *cluster.Cluster
	config  *rest.Config
	reset   *resetter
}

// shared are the API servers of this process.
var shared struct {
	sync.Mutex
	// dir has their state; empty outside of Main.
	dir  string
	free map[string][]*server // by what they were started with
	all  []*cluster.Cluster
	uses int
}

// Main runs the tests of a package that uses Start, StartBare or StartOwn, and then stops its API
// servers:
//
//	func TestMain(m *testing.M) { controlplane.Main(m) }
func Main(m *testing.M) {
	dir, err := os.MkdirTemp("", "spillway-test-*")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	shared.dir, shared.free = dir, map[string][]*server{}
	code := m.Run()
	for _, c := range shared.all {
		c.Kill()
	}
	if len(shared.all) > 0 {
		fmt.Printf("API servers: %d for %d uses\n", len(shared.all), shared.uses)
	}
	if err := os.RemoveAll(dir); err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = max(code, 1)
	}
	os.Exit(code)
}

// use gives a test an API server until the test ends, and then resets it, unless it is the test's
// own. A test that leaves what cannot be removed, or what changes it still, fails.
func use(t testing.TB, crds, flags []string, own string) *rest.Config {
	t.Helper()
	kind := strings.Join(flags, " ") + "|" + strings.Join(crds, " ") + "|" + own
	s, err := take(kind, crds, flags)
	if err != nil {
		t.Fatalf("starting an API server: %v", err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		if err := s.cluster.Err(); err != nil {
			t.Errorf("the API server: %v", err)
			return
		}
		if own != "" {
			s.cluster.Kill()
			return
		}
		if err := s.reset.run(ctx); err != nil {
			t.Errorf("resetting the API server: %v", err)
			return // the next test gets another one
		}
		shared.Lock()
		defer shared.Unlock()
		shared.free[kind] = append(shared.free[kind], s)
	})
	return rest.CopyConfig(s.config)
}

func take(kind string, crds, flags []string) (*server, error) {
	shared.Lock()
	defer shared.Unlock()
	if shared.dir == "" {
		return nil, fmt.Errorf("the package has no TestMain that calls controlplane.Main")
	}
	shared.uses++
	if free := shared.free[kind]; len(free) > 0 {
		shared.free[kind] = free[:len(free)-1]
		return free[len(free)-1], nil
	}
	options := cluster.Options{
		Name: fmt.Sprintf("test-%d", len(shared.all)), Dir: filepath.Join(shared.dir, fmt.Sprint(len(shared.all))), DefaultTimings: true,
		APIServerFlags: []string{
			"--disable-admission-plugins=ServiceAccount",                        // no controller makes those of namespaces
			"--endpoint-reconciler-type=lease", "--advertise-address=192.0.2.2", // as in a cluster, its Service has endpoints
		},
	}
	for _, flag := range flags {
		options.APIServerFlags = append(options.APIServerFlags, "--"+flag)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Minute) // the first run builds
	defer cancel()
	c, err := run(ctx, options, crds)
	if err != nil {
		return nil, err
	}
	shared.all = append(shared.all, c)
	s := &server{cluster: c, config: rest.CopyConfig(c.Admin)}
	if err := rest.LoadTLSFiles(s.config); err != nil {
		return nil, err
	}
	// Tests pass the credentials on as data.
	s.config.CAFile, s.config.CertFile, s.config.KeyFile = "", "", ""
	s.config.QPS, s.config.Burst = 1000, 2000
	s.reset, err = newResetter(ctx, s.config)
	return s, err
}
