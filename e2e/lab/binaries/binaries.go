// Package binaries builds programs from pinned Go modules and keeps them in the
// user's cache, keyed by what they are built from: a second run is quick, and so
// is the first run of a new checkout.
package binaries

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"
)

// KubernetesVersion of every control plane and node that the project starts, unless an older
// one is asked for.
const KubernetesVersion = "v1.37.2"

// Modules of the programs, relative to the project's root. Upstream and the project's own
// module require the same versions wherever they can, so that a package is compiled once for
// both. Liqo requires Kubernetes 1.35.
const (
	upstream    = "e2e/lab/binaries/upstream"
	v136        = "e2e/lab/binaries/kubernetes-1.36"
	v135        = "e2e/lab/binaries/kubernetes-1.35"
	certManager = "e2e/lab/binaries/certmanager"
	tools       = ".tools"
)

// versions of Kubernetes by module.
var versions = map[string]string{upstream: KubernetesVersion, v136: "v1.36.3", v135: "v1.35.4"}

// program is a package to build, which has the program's name as its last
// element.
type program struct{ module, pkg string }

func (p program) name() string { return path.Base(p.pkg) }

// programs are all that can be built, by name.
var programs = byName(
	program{upstream, "k8s.io/kubernetes/cmd/kube-apiserver"},
	program{upstream, "k8s.io/kubernetes/cmd/kube-controller-manager"},
	program{upstream, "k8s.io/kubernetes/cmd/kube-scheduler"},
	program{upstream, "k8s.io/kubernetes/cmd/kube-proxy"},
	program{upstream, "k8s.io/kubernetes/cmd/kubelet"},
	program{upstream, "k8s.io/kubernetes/cmd/kubeadm"},
	program{upstream, "k8s.io/kubernetes/cmd/kubectl"},
	program{upstream, "sigs.k8s.io/kind"},
	program{upstream, "./etcd"},
	program{upstream, "./pause"},
	program{upstream, "github.com/containernetworking/plugins/plugins/ipam/host-local"},
	program{upstream, "github.com/containernetworking/plugins/plugins/main/loopback"},
	program{upstream, "github.com/containernetworking/plugins/plugins/main/ptp"},
	program{upstream, "./coredns"},
	program{upstream, "helm.sh/helm/v3/cmd/helm"},
	program{upstream, "./render"},
	program{upstream, "./metrics-server"},
	program{upstream, "./kube-router"},
	program{v135, "github.com/liqotech/liqo/cmd/liqo-controller-manager"},
	program{v135, "github.com/liqotech/liqo/cmd/crd-replicator"},
	program{v135, "github.com/liqotech/liqo/cmd/webhook"},
	program{v135, "github.com/liqotech/liqo/cmd/virtual-kubelet"},
	program{certManager, "./cert-manager"},
	program{tools, "sigs.k8s.io/controller-tools/cmd/controller-gen"},
	program{tools, "gotest.tools/gotestsum"},
	program{tools, "honnef.co/go/tools/cmd/staticcheck"},
)

// byName returns programs by name. Those of a control plane of an older version have its minor
// in their name, as kube-apiserver-1.35.
func byName(list ...program) map[string]program {
	m := map[string]program{}
	for _, p := range list {
		m[p.name()] = p
	}
	for _, module := range []string{v136, v135} {
		for _, name := range []string{"kube-apiserver", "kube-controller-manager"} {
			m[name+"-"+minor(versions[module])] = program{module, m[name].pkg}
		}
	}
	return m
}

// minor returns the minor of a version, as 1.37.
func minor(version string) string { return version[1:strings.LastIndex(version, ".")] }

// flagsFor returns the build flags of a module. Those of the compiler are the same for all:
// others would compile every package again.
func flagsFor(module string) []string {
	version := cmp.Or(versions[module], KubernetesVersion)
	return []string{
		"-trimpath", "-buildvcs=false",
		"-ldflags=-s -w" +
			" -X k8s.io/component-base/version.gitVersion=" + version +
			" -X k8s.io/component-base/version.gitMajor=1" +
			" -X k8s.io/component-base/version.gitMinor=" + strings.TrimPrefix(minor(version), "1."),
	}
}

// Root returns the project's root directory, which is the working directory or one
// of its parents.
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
		return "", errors.New("not inside a checkout of Spillway")
	}
}

// CacheDir returns the directory of build products: $XDG_CACHE_HOME/spillway.
func CacheDir() (string, error) {
	base, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("finding the cache directory: %w (set XDG_CACHE_HOME)", err)
	}
	return filepath.Join(base, "spillway"), nil
}

// Log logs a line of progress.
type Log func(format string, args ...any)

func orDiscard(log Log) Log {
	if log == nil {
		return func(string, ...any) {}
	}
	return log
}

// Program is Programs for one program. log may be nil.
func Program(ctx context.Context, name string, log Log) (string, error) {
	paths, err := Programs(ctx, log, name)
	return paths[name], err
}

// Programs returns the paths of programs by name. Those that the cache does not
// hold are built first: one go build for each module, since packages that the
// programs share are compiled once and programs are linked in parallel.
func Programs(ctx context.Context, log Log, names ...string) (map[string]string, error) {
	log = orDiscard(log)
	root, err := Root()
	if err != nil {
		return nil, err
	}
	paths := map[string]string{}
	missing := map[string][]program{} // by module
	for _, name := range names {
		p, ok := programs[name]
		if !ok {
			return nil, fmt.Errorf("there is no program %q: use one of %s", name, strings.Join(slices.Sorted(maps.Keys(programs)), ", "))
		}
		dir, err := cacheFor(root, p.module)
		if err != nil {
			return nil, err
		}
		paths[name] = filepath.Join(dir, p.name())
		if _, err := os.Stat(paths[name]); err != nil {
			missing[p.module] = append(missing[p.module], p)
		}
	}
	// One module after the other: two builds at once would compile the packages that they
	// share twice.
	for _, module := range []string{upstream, v136, v135, certManager, tools} {
		if err := buildMissing(ctx, root, module, missing[module], log); err != nil {
			return nil, err
		}
	}
	return paths, nil
}

// Own builds packages of the project, as "./broker", into dir. Each program is
// named after its package's folder. The Go build cache makes a repetition quick. log may
// be nil.
func Own(ctx context.Context, log Log, dir string, packages ...string) error {
	root, err := Root()
	if err != nil {
		return err
	}
	return goBuild(ctx, root, ".", dir, orDiscard(log), packages...)
}

// ModuleDir returns the directory of a module that upstream programs, Liqo's or cert-manager
// require, and its version. The module is downloaded if the module cache does not hold it.
func ModuleDir(ctx context.Context, module string) (dir, version string, err error) {
	root, err := Root()
	if err != nil {
		return "", "", err
	}
	folder := filepath.Join(root, upstream)
	switch {
	case strings.HasPrefix(module, "github.com/liqotech/"):
		folder = filepath.Join(root, v135)
	case strings.HasPrefix(module, "github.com/cert-manager/"):
		folder = filepath.Join(root, certManager)
	}
	// go list names no directory for a module that was not downloaded; go mod
	// download is slow on an empty cache, since it reads every go.mod file.
	for _, command := range [][]string{{"list", "-m"}, {"mod", "download"}} {
		out, err := goCommand(ctx, folder, nil, append(command, "-json", module)...)
		if err != nil {
			return "", "", fmt.Errorf("%w%s", err, out) // the output has the reason
		}
		var found struct{ Dir, Version string }
		if err := json.Unmarshal(out, &found); err != nil {
			return "", "", fmt.Errorf("locating module %s: %w", module, err)
		}
		if found.Dir != "" {
			return found.Dir, found.Version, nil
		}
	}
	return "", "", fmt.Errorf("module %s has no directory after its download", module)
}

// cacheFor returns the directory of a module's programs. Its name is a hash of the
// module's go.mod, go.sum and sources, the Go version and the flags.
func cacheFor(root, module string) (string, error) {
	base, err := CacheDir()
	if err != nil {
		return "", err
	}
	h := sha256.New()
	fmt.Fprintln(h, runtime.Version(), runtime.GOARCH, flagsFor(module))
	err = filepath.WalkDir(filepath.Join(root, module), func(path string, d fs.DirEntry, err error) error {
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
	return filepath.Join(base, "bin", hex.EncodeToString(h.Sum(nil))[:16]), err
}

// buildMissing builds programs of a module into its cache, unless another process
// has built them while this one waited for the lock.
func buildMissing(ctx context.Context, root, module string, list []program, log Log) error {
	if len(list) == 0 {
		return nil
	}
	dir, err := cacheFor(root, module)
	if err != nil {
		return err
	}
	temp := filepath.Join(dir, "building")
	if err := os.MkdirAll(temp, 0o755); err != nil {
		return err
	}
	unlock, err := Lock(ctx, filepath.Join(dir, "lock"))
	if err != nil {
		return err
	}
	defer unlock()
	var names, packages []string
	for _, p := range list {
		if _, err := os.Stat(filepath.Join(dir, p.name())); err != nil {
			names, packages = append(names, p.name()), append(packages, p.pkg)
		}
	}
	if len(names) == 0 {
		return nil
	}
	what := strings.Join(names, ", ")
	if version := versions[module]; version != "" && version != KubernetesVersion {
		what += " of " + version
	}
	log("building %s …", what)
	start := time.Now()
	if err := goBuild(ctx, root, module, temp, log, packages...); err != nil {
		return err
	}
	for _, name := range names {
		if err := os.Rename(filepath.Join(temp, name), filepath.Join(dir, name)); err != nil {
			return err
		}
	}
	log("built %s in %s", what, time.Since(start).Round(100*time.Millisecond))
	return nil
}

// Lock locks a file exclusively. It waits until the lock is free or ctx ends. The
// kernel releases the lock when the process terminates.
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
			return nil, fmt.Errorf("waiting for the lock on %s, which another process holds: %w", path, ctx.Err())
		case <-time.After(200 * time.Millisecond):
		}
	}
}
