package image

import (
	"context"
	"crypto/sha256"
	_ "embed"
	"encoding/hex"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sync/errgroup"

	"github.com/spillway-dev/spillway/e2e/lab/binaries"
	"github.com/spillway-dev/spillway/e2e/lab/engine"
)

const (
	// suite is Debian 12: newer versions of systemd do not support cgroup v1.
	suite = "bookworm"
	// liqoVersion is the tag of the images in Liqo's chart.
	liqoVersion = "v1.2.0"
	// MetricsServerVersion is the tag of the image in metrics-server's chart.
	MetricsServerVersion = "v0.7.2"
	pauseImage           = "registry.k8s.io/pause:3.10.2"
	// KubeRouterImage enforces NetworkPolicies.
	KubeRouterImage = "docker.io/cloudnativelabs/kube-router:v2.1.0"
)

// debianPackages are the packages of the node image.
var debianPackages = []string{
	"bash", "ca-certificates", "conntrack", "containerd", "containernetworking-plugins", "curl", "dbus", "e2fsprogs",
	"ebtables", "ethtool", "iproute2", "ipset", "iptables", "jq", "kmod", "libseccomp2", "mount", "nftables", "openssl",
	"pigz", "procps", "rsync", "runc", "socat", "systemd", "systemd-sysv", "util-linux",
}

// nodePrograms are installed in /usr/bin of a node, cniPlugins in /opt/cni/bin.
var (
	nodePrograms = []string{"kubeadm", "kubectl", "kubelet"}
	cniPlugins   = []string{"host-local", "loopback", "ptp"}
)

//go:embed node.sh
var nodeScript string

// component is an image that is preloaded on every node.
type component struct{ program, image, path string }

// The tags are those that kubeadm of KubernetesVersion asks for.
var components = []component{
	{"kube-apiserver", "registry.k8s.io/kube-apiserver:" + binaries.KubernetesVersion, "usr/local/bin/kube-apiserver"},
	{"kube-controller-manager", "registry.k8s.io/kube-controller-manager:" + binaries.KubernetesVersion, "usr/local/bin/kube-controller-manager"},
	{"kube-scheduler", "registry.k8s.io/kube-scheduler:" + binaries.KubernetesVersion, "usr/local/bin/kube-scheduler"},
	{"kube-proxy", "registry.k8s.io/kube-proxy:" + binaries.KubernetesVersion, "usr/local/bin/kube-proxy"},
	{"etcd", "registry.k8s.io/etcd:3.7.0-0", "usr/local/bin/etcd"},
	{"coredns", "registry.k8s.io/coredns/coredns:v1.14.6", "coredns"},
	{"pause", pauseImage, "pause"},
	{"liqo-controller-manager", "ghcr.io/liqotech/liqo-controller-manager:" + liqoVersion, "usr/bin/liqo-controller-manager"},
	{"crd-replicator", "ghcr.io/liqotech/crd-replicator:" + liqoVersion, "usr/bin/crd-replicator"},
	{"metrics-server", "registry.k8s.io/metrics-server/metrics-server:" + MetricsServerVersion, "metrics-server"},
	{"kube-router", KubeRouterImage, "usr/local/bin/kube-router"},
	{"webhook", "ghcr.io/liqotech/webhook:" + liqoVersion, "usr/bin/webhook"},
	{"virtual-kubelet", "ghcr.io/liqotech/virtual-kubelet:" + liqoVersion, "usr/bin/virtual-kubelet"},
}

// tables are the components that run iptables and ipset, on the slim root of the nodes'
// Debian that they need.
var tables = []string{"kube-proxy", "kube-router"}

// Node returns the name of the node image, which has the images of the control
// plane, kube-router, metrics-server and Liqo preloaded. The image is built if docker does not
// have it.
func Node(ctx context.Context, log binaries.Log) (string, error) {
	// kind is built with the rest because its module has the base image's files.
	names := slices.Concat(nodePrograms, cniPlugins, []string{"kind"})
	for _, c := range components {
		names = append(names, c.program)
	}
	var programs map[string]string
	var root string
	group, groupCtx := errgroup.WithContext(ctx)
	group.Go(func() (err error) {
		programs, err = binaries.Programs(groupCtx, log, names...)
		return err
	})
	group.Go(func() (err error) {
		root, err = rootfs(groupCtx, log)
		return err
	})
	if err := group.Wait(); err != nil {
		return "", err
	}
	kindDir, kindVersion, err := binaries.ModuleDir(ctx, "sigs.k8s.io/kind")
	if err != nil {
		return "", err
	}

	h := sha256.New()
	fmt.Fprintln(h, suite, debianPackages, kindVersion, nodeScript, components)
	for _, name := range slices.Sorted(slices.Values(names)) {
		fmt.Fprintln(h, programs[name])
	}
	tag := "spillway-lab/node:" + hex.EncodeToString(h.Sum(nil))[:16]
	if _, err := engine.Docker(ctx, "image", "inspect", tag); err == nil {
		return tag, nil
	}

	cache, err := binaries.CacheDir()
	if err != nil {
		return "", err
	}
	work, err := os.MkdirTemp(filepath.Join(cache, "lab"), "node-*")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(work)

	log("assembling the node image …")
	tree := filepath.Join(work, "root")
	if _, err := engine.Run(exec.CommandContext(ctx, "cp", "-a", root, tree)); err != nil {
		return "", err
	}
	for dir, list := range map[string][]string{"usr/bin": nodePrograms, "opt/cni/bin": cniPlugins} {
		if err := os.MkdirAll(filepath.Join(tree, dir), 0o755); err != nil {
			return "", err
		}
		for _, name := range list {
			if _, err := engine.Run(exec.CommandContext(ctx, "cp", programs[name], filepath.Join(tree, dir, name))); err != nil {
				return "", err
			}
		}
	}
	script := exec.CommandContext(ctx, "sh", "-euc", nodeScript)
	script.Env = append(os.Environ(), "TREE="+tree, "FILES="+filepath.Join(kindDir, "images/base/files"), "KUBERNETES="+binaries.KubernetesVersion, "PAUSE="+pauseImage)
	if _, err := engine.Run(script); err != nil {
		return "", fmt.Errorf("adjusting the node's files: %w", err)
	}
	base := tag + "-base"
	pipe := exec.CommandContext(ctx, "sh", "-euc", `tar -C "$1" --numeric-owner -c . | docker import --change 'ENV container=docker' --change 'ENTRYPOINT ["/usr/local/bin/entrypoint","/sbin/init"]' - "$2"`, "sh", tree, base)
	if _, err := engine.Run(pipe); err != nil {
		return "", fmt.Errorf("importing the node image: %w", err)
	}
	defer engine.Docker(context.WithoutCancel(ctx), "image", "rm", base)
	return tag, preload(ctx, log, base, tag, root, work, programs)
}

// preload imports the component images into a node's containerd and commits the
// result.
func preload(ctx context.Context, log binaries.Log, base, tag, root, work string, programs map[string]string) error {
	log("preloading images into the node image …")
	const name = "spillway-lab-preload"
	engine.Docker(ctx, "rm", "-f", "-v", name) // left by an interrupted run
	if _, err := engine.Docker(ctx, "run", "-d", "--privileged", "--name", name, "--entrypoint", "sleep", base, "infinity"); err != nil {
		return err
	}
	defer engine.Docker(context.WithoutCancel(ctx), "rm", "-f", "-v", name)
	if _, err := engine.Docker(ctx, "exec", "-d", name, "containerd"); err != nil {
		return err
	}
	if _, err := engine.Docker(ctx, "exec", name, "sh", "-c", "for i in $(seq 100); do ctr version >/dev/null 2>&1 && exit 0; sleep 0.1; done; exit 1"); err != nil {
		return fmt.Errorf("starting containerd in the node image: %w", err)
	}
	for _, c := range components {
		files := []File{{Path: c.path, Source: programs[c.program]}}
		if slices.Contains(tables, c.program) {
			tools, err := tablesFiles(ctx, root)
			if err != nil {
				return err
			}
			files = append(files, tools...)
		}
		archive := filepath.Join(work, c.program+".tar")
		if err := Write(archive, Spec{Name: c.image, Files: files, Entrypoint: []string{"/" + c.path}}); err != nil {
			return err
		}
		if err := importInto(ctx, name, archive); err != nil {
			return fmt.Errorf("preloading %s: %w", c.image, err)
		}
		if err := os.Remove(archive); err != nil {
			return err
		}
	}
	// The image store is consistent only after containerd has terminated.
	if _, err := engine.Docker(ctx, "exec", name, "sh", "-c", "pkill -TERM containerd; for i in $(seq 100); do pgrep -x containerd >/dev/null || exit 0; sleep 0.1; done; exit 1"); err != nil {
		return err
	}
	_, err := engine.Docker(ctx, "commit", "--change", `ENTRYPOINT ["/usr/local/bin/entrypoint","/sbin/init"]`, name, tag)
	return err
}

// Load imports those image archives, by the images' names, that a running node does not have.
func Load(ctx context.Context, node string, archives map[string]string) error {
	loaded, err := engine.Docker(ctx, "exec", node, "ctr", "-n", "k8s.io", "images", "list", "-q")
	if err != nil {
		return err
	}
	for name, archive := range archives {
		if slices.Contains(strings.Fields(loaded), "docker.io/library/"+name) {
			continue
		}
		if err := importInto(ctx, node, archive); err != nil {
			return fmt.Errorf("loading %s on %s: %w", name, node, err)
		}
	}
	return nil
}

func importInto(ctx context.Context, container, archive string) error {
	in, err := os.Open(archive)
	if err != nil {
		return err
	}
	defer in.Close()
	cmd := exec.CommandContext(ctx, "docker", "exec", "-i", container, "ctr", "-n", "k8s.io", "images", "import", "--all-platforms", "--digests=false", "-")
	cmd.Stdin = in
	_, err = engine.Run(cmd)
	return err
}

// rootfs returns a directory with Debian and the packages of a node, installed from
// the mirror that this machine's apt uses.
func rootfs(ctx context.Context, log binaries.Log) (string, error) {
	cache, err := binaries.CacheDir()
	if err != nil {
		return "", err
	}
	sum := sha256.Sum256([]byte(suite + strings.Join(debianPackages, ",")))
	dir := filepath.Join(cache, "lab", "rootfs-"+hex.EncodeToString(sum[:8]))
	if _, err := os.Stat(dir); err == nil {
		return dir, nil
	}
	if err := os.MkdirAll(filepath.Dir(dir), 0o755); err != nil {
		return "", err
	}
	log("installing Debian %s for the nodes …", suite)
	args := []string{"--variant=minbase", "--include=" + strings.Join(debianPackages, ","), suite, dir + ".tmp"}
	targets, err := engine.Run(exec.CommandContext(ctx, "apt-get", "indextargets", "--format", "$(REPO_URI) $(CODENAME)", "Created-By: Packages"))
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(targets) {
		if uri, codename, _ := strings.Cut(strings.TrimSpace(line), " "); codename == suite {
			args = append(args, uri)
			break
		}
	}
	if err := os.RemoveAll(dir + ".tmp"); err != nil {
		return "", err
	}
	if _, err := engine.Run(exec.CommandContext(ctx, "debootstrap", args...)); err != nil {
		return "", err
	}
	return dir, os.Rename(dir+".tmp", dir)
}

// tablesFiles returns iptables, ipset and the libraries that they load, from the nodes'
// Debian.
func tablesFiles(ctx context.Context, root string) ([]File, error) {
	var files []File
	var dynamic []string
	for _, program := range []string{"usr/sbin/xtables-nft-multi", "usr/sbin/ipset"} {
		files = append(files, File{Path: program, Source: filepath.Join(root, program)})
		dynamic = append(dynamic, "/"+program)
	}
	for _, name := range []string{"iptables", "iptables-save", "iptables-restore", "ip6tables", "ip6tables-save", "ip6tables-restore"} {
		files = append(files, File{Path: "usr/sbin/" + name, Link: "xtables-nft-multi"})
	}
	extensions, err := filepath.Glob(filepath.Join(root, "usr/lib/*/xtables/*.so"))
	if err != nil || len(extensions) == 0 {
		return nil, fmt.Errorf("no iptables extensions in %s (%w)", root, err)
	}
	for _, path := range extensions {
		inside := strings.TrimPrefix(path, root)
		files = append(files, File{Path: inside[1:], Source: path})
		dynamic = append(dynamic, inside)
	}
	out, err := engine.Run(exec.CommandContext(ctx, "chroot", append([]string{root, "ldd"}, dynamic...)...))
	if err != nil {
		return nil, err
	}
	seen := map[string]bool{}
	for line := range strings.Lines(out) {
		for field := range strings.FieldsSeq(line) {
			if !strings.HasPrefix(field, "/lib") || strings.HasSuffix(field, ":") || seen[field] {
				continue
			}
			seen[field] = true
			// /lib is a link to /usr/lib in Debian, and a directory in the image.
			files = append(files, File{Path: field[1:], Source: filepath.Join(root, "usr", field)})
		}
	}
	return files, nil
}
