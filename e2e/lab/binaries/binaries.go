// Package binaries makes programs from pinned Go modules and keeps them in the
// user's cache, keyed by what made them, so that a second run is quick and a
// clean checkout is not slow.
package binaries

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"time"
)

// KubernetesVersion of every control plane and node that the project starts.
const KubernetesVersion = "v1.35.4"

// A program is one package of one of the modules beside this file, or of the
// project itself.
type program struct {
	// module is the directory of the module, relative to the project's root.
	module string
	// pkg is the package to build, relative to the module or by import path.
	pkg string
}

const (
	clusterModule = "e2e/lab/binaries/cluster"
	liqoModule    = "e2e/lab/binaries/liqo"
)

var programs = map[string]program{
	"kube-apiserver":          {clusterModule, "k8s.io/kubernetes/cmd/kube-apiserver"},
	"kube-controller-manager": {clusterModule, "k8s.io/kubernetes/cmd/kube-controller-manager"},
	"kube-scheduler":          {clusterModule, "k8s.io/kubernetes/cmd/kube-scheduler"},
	"kube-proxy":              {clusterModule, "k8s.io/kubernetes/cmd/kube-proxy"},
	"kubelet":                 {clusterModule, "k8s.io/kubernetes/cmd/kubelet"},
	"kubeadm":                 {clusterModule, "k8s.io/kubernetes/cmd/kubeadm"},
	"kubectl":                 {clusterModule, "k8s.io/kubernetes/cmd/kubectl"},
	"kind":                    {clusterModule, "sigs.k8s.io/kind"},
	"etcd":                    {clusterModule, "./etcd"},
	"pause":                   {clusterModule, "./pause"},
	"host-local":              {clusterModule, "github.com/containernetworking/plugins/plugins/ipam/host-local"},
	"bridge":                  {clusterModule, "github.com/containernetworking/plugins/plugins/main/bridge"},
	"loopback":                {clusterModule, "github.com/containernetworking/plugins/plugins/main/loopback"},
	"ptp":                     {clusterModule, "github.com/containernetworking/plugins/plugins/main/ptp"},
	"portmap":                 {clusterModule, "github.com/containernetworking/plugins/plugins/meta/portmap"},
	"coredns":                 {"e2e/lab/binaries/coredns", "github.com/coredns/coredns"},
	"helm":                    {"e2e/lab/binaries/helm", "helm.sh/helm/v3/cmd/helm"},
	"kwok":                    {"e2e/lab/binaries/kwok", "sigs.k8s.io/kwok/cmd/kwok"},
	"metrics-server":          {"e2e/lab/binaries/metrics-server", "sigs.k8s.io/metrics-server/cmd/metrics-server"},
	"liqo-controller-manager": {liqoModule, "github.com/liqotech/liqo/cmd/liqo-controller-manager"},
	"crd-replicator":          {liqoModule, "github.com/liqotech/liqo/cmd/crd-replicator"},
	"webhook":                 {liqoModule, "github.com/liqotech/liqo/cmd/webhook"},
	"virtual-kubelet":         {liqoModule, "github.com/liqotech/liqo/cmd/virtual-kubelet"},
	"controller-gen":          {".tools", "sigs.k8s.io/controller-tools/cmd/controller-gen"},
	"staticcheck":             {".tools", "honnef.co/go/tools/cmd/staticcheck"},
}

// flags are the one set of build flags: another set would compile everything
// again.
var flags = []string{
	"-trimpath", "-buildvcs=false",
	"-ldflags=-s -w" +
		" -X k8s.io/component-base/version.gitVersion=" + KubernetesVersion +
		" -X k8s.io/component-base/version.gitMajor=1" +
		" -X k8s.io/component-base/version.gitMinor=35",
}

// Root is the project's root directory, found upwards from the working
// directory.
func Root() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for {
		text, err := os.ReadFile(filepath.Join(dir, "go.mod"))
		if err == nil && strings.HasPrefix(string(text), "module github.com/spillway-dev/spillway\n") {
			return dir, nil
		}
		if parent := filepath.Dir(dir); parent != dir {
			dir = parent
			continue
		}
		return "", errors.New("not inside the Spillway source tree: run this from a checkout")
	}
}

// CacheDir is where build products are kept: $XDG_CACHE_HOME/spillway.
func CacheDir() (string, error) {
	base, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("finding the cache directory: %w (set XDG_CACHE_HOME)", err)
	}
	return filepath.Join(base, "spillway"), nil
}

// Program returns the path of a program, building it first where the cache does
// not hold it. Progress goes to log, which may be nil.
func Program(ctx context.Context, name string, log func(format string, args ...any)) (string, error) {
	p, ok := programs[name]
	if !ok {
		return "", fmt.Errorf("no program called %q is known here", name)
	}
	root, err := Root()
	if err != nil {
		return "", err
	}
	module := filepath.Join(root, p.module)
	key, err := moduleKey(module)
	if err != nil {
		return "", err
	}
	return cached(ctx, name, key+p.pkg, log, func(ctx context.Context, target string) error {
		return goBuild(ctx, module, p.pkg, target)
	})
}

// Own builds one of the project's own programs (a package path relative to the
// root, as "./broker") into target. The Go build cache makes a repetition quick.
func Own(ctx context.Context, pkg, target string) error {
	root, err := Root()
	if err != nil {
		return err
	}
	return goBuild(ctx, root, pkg, target)
}

func goBuild(ctx context.Context, dir, pkg, target string) error {
	args := append([]string{"build"}, flags...)
	cmd := exec.CommandContext(ctx, "go", append(args, "-o", target, pkg)...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOTOOLCHAIN=local", "GOWORK=off", "GOFLAGS=")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("building %s in %s: %w\n%s", pkg, dir, err, tail(out, 4000))
	}
	return nil
}

// moduleKey hashes what a module's programs are made of: its go.mod, go.sum and
// own sources.
func moduleKey(dir string) (string, error) {
	h := sha256.New()
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		if n := d.Name(); n != "go.mod" && n != "go.sum" && filepath.Ext(n) != ".go" {
			return nil
		}
		text, err := os.ReadFile(path)
		fmt.Fprintf(h, "%s %d\n", d.Name(), len(text))
		h.Write(text)
		return err
	})
	return hex.EncodeToString(h.Sum(nil)), err
}

// cached runs build into a temporary file and keeps the result under name and a
// hash of key. Several processes may ask at once; one builds.
func cached(ctx context.Context, name, key string, log func(string, ...any), build func(context.Context, string) error) (string, error) {
	if log == nil {
		log = func(string, ...any) {}
	}
	sum := sha256.Sum256([]byte(strings.Join(append([]string{runtime.Version(), runtime.GOARCH, key}, flags...), "\n")))
	base, err := CacheDir()
	if err != nil {
		return "", err
	}
	dir := filepath.Join(base, "bin", hex.EncodeToString(sum[:8]))
	path := filepath.Join(dir, name)
	if _, err := os.Stat(path); err == nil {
		return path, nil
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", err
	}
	unlock, err := Lock(ctx, path+".lock")
	if err != nil {
		return "", err
	}
	defer unlock()
	if _, err := os.Stat(path); err == nil {
		return path, nil
	}
	log("building %s …", name)
	start := time.Now()
	if err := build(ctx, path+".tmp"); err != nil {
		return "", err
	}
	if err := os.Rename(path+".tmp", path); err != nil {
		return "", err
	}
	log("built %s in %s", name, time.Since(start).Round(100*time.Millisecond))
	return path, nil
}

// Lock takes an exclusive lock on a file, waiting for whoever holds it until ctx
// ends. The kernel gives it back when the process ends, however it ends.
func Lock(ctx context.Context, path string) (unlock func(), err error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, err
	}
	for {
		err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if err == nil {
			return func() { f.Close() }, nil
		}
		if !errors.Is(err, syscall.EWOULDBLOCK) {
			f.Close()
			return nil, fmt.Errorf("locking %s: %w", path, err)
		}
		select {
		case <-ctx.Done():
			f.Close()
			return nil, fmt.Errorf("waiting for the lock on %s, which another run holds: %w", path, ctx.Err())
		case <-time.After(200 * time.Millisecond):
		}
	}
}

func tail(b []byte, n int) []byte {
	if len(b) > n {
		return b[len(b)-n:]
	}
	return b
}
