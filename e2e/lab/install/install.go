// Package install installs Spillway on the lab's clusters with helm, Liqo or metrics-server by the
// driver, and kube-router, which enforces their NetworkPolicies.
package install

import (
	"context"
	"crypto/sha256"
	_ "embed"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"golang.org/x/sync/errgroup"

	"github.com/spillway-dev/spillway/e2e/lab/binaries"
	"github.com/spillway-dev/spillway/e2e/lab/cluster"
	"github.com/spillway-dev/spillway/e2e/lab/engine"
	"github.com/spillway-dev/spillway/e2e/lab/image"
)

// Drivers are the drivers that the lab's clusters can peer with.
var Drivers = []string{"liqo", "direct"}

// Up installs or upgrades kube-router and Spillway on a running lab, with the given driver and what
// it needs: Liqo with liqo, metrics-server with direct. What the other driver needs stays there.
func Up(ctx context.Context, lab *cluster.Lab, driver string) error {
	helm, err := binaries.Program(ctx, "helm", lab.Log)
	if err != nil {
		return err
	}
	images, err := Images(ctx, lab.Log)
	if err != nil {
		return err
	}
	i := installer{lab: lab, helm: helm, images: images, driver: driver, tags: map[string]string{}}
	for _, img := range images {
		_, i.tags[img.Program], _ = strings.Cut(img.Name, ":")
	}
	lab.Log("loading Spillway's images …")
	if err := i.load(ctx); err != nil {
		return err
	}
	if err := i.restoreSchedulers(ctx); err != nil {
		return fmt.Errorf("restoring kube-scheduler: %w", err)
	}
	if err := i.networkPolicies(ctx); err != nil {
		return fmt.Errorf("installing kube-router: %w", err)
	}
	if driver == "liqo" {
		if err := i.liqo(ctx); err != nil {
			return fmt.Errorf("installing Liqo: %w", err)
		}
	} else if err := i.metricsServer(ctx); err != nil { // Liqo here does not report the usage of guests
		return fmt.Errorf("installing metrics-server: %w", err)
	}
	if err := i.spillway(ctx); err != nil {
		return fmt.Errorf("installing Spillway: %w", err)
	}
	return nil
}

type installer struct {
	lab    *cluster.Lab
	helm   string
	images []Image
	driver string
	// tags of the images by program.
	tags map[string]string
}

// onAll calls f for each cluster, two at a time.
func onAll(ctx context.Context, f func(context.Context, cluster.Cluster) error) error {
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(2)
	for _, c := range cluster.Topology {
		group.Go(func() error { return f(ctx, c) })
	}
	return group.Wait()
}

// onMembers is onAll for the members.
func onMembers(ctx context.Context, f func(context.Context, cluster.Cluster) error) error {
	return onAll(ctx, func(ctx context.Context, c cluster.Cluster) error {
		if !c.Member {
			return nil
		}
		return f(ctx, c)
	})
}

// Image is an archive of one of the project's images.
type Image struct {
	// Program in the image, Name with a tag derived from the content, and path of
	// the Archive.
	Program, Name, Archive string
}

// own are the project's programs in images, and their packages.
var own = []struct{ name, pkg string }{
	{"spillway-broker", "./broker"},
	{"spillway-agent", "./agent"},
	{"spillway-scheduler", "./scheduler-plugin"},
	{"spillway-virtual-node", "./virtual-node"},
	{Workload, "./e2e/lab/workload"},
}

// Workload is the program that the pods of the scenarios run.
const Workload = "spillway-lab-workload"

// Images builds the project's images into the cache. Their tags are derived from
// their content, so that an upgrade replaces only what changed.
func Images(ctx context.Context, log binaries.Log) ([]Image, error) {
	cache, err := binaries.CacheDir()
	if err != nil {
		return nil, err
	}
	dir := filepath.Join(cache, "lab", "images")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, err
	}
	log("building Spillway's own programs …")
	var packages []string
	for _, o := range own {
		packages = append(packages, o.pkg)
	}
	if err := binaries.Own(ctx, log, dir, packages...); err != nil {
		return nil, err
	}
	var images []Image
	for _, o := range own {
		binary := filepath.Join(dir, filepath.Base(o.pkg))
		sum, err := fileSum(binary)
		if err != nil {
			return nil, err
		}
		i := Image{Program: o.name, Name: o.name + ":" + sum[:16]}
		i.Archive = filepath.Join(dir, o.name+"-"+sum[:16]+".tar")
		if _, err := os.Stat(i.Archive); err != nil {
			old, err := filepath.Glob(filepath.Join(dir, o.name+"-????????????????.tar"))
			if err != nil {
				return nil, err
			}
			for _, path := range old {
				if err := os.Remove(path); err != nil {
					return nil, err
				}
			}
			if err := image.Write(i.Archive, image.Spec{
				Name:       i.Name,
				Files:      []image.File{{Path: o.name, Source: binary}},
				Entrypoint: []string{"/" + o.name},
				User:       "65532:65532",
			}); err != nil {
				return nil, err
			}
		}
		images = append(images, i)
	}
	return images, nil
}

func fileSum(path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return "", err
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}

func (i *installer) load(ctx context.Context) error {
	archives := map[string]string{}
	for _, img := range i.images {
		archives[img.Name] = img.Archive
	}
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(2)
	for _, c := range cluster.Topology {
		for _, node := range c.Nodes() {
			group.Go(func() error { return image.Load(ctx, node, archives) })
		}
	}
	return group.Wait()
}

// helmUpgrade installs or upgrades a release and waits until its workloads are
// available. A release that was deployed from the same chart and values is left
// alone. A value that begins with @ is read from a file.
func (i *installer) helmUpgrade(ctx context.Context, c cluster.Cluster, namespace, release, chart string, values ...string) error {
	target := []string{"--kubeconfig", i.lab.Kubeconfig, "--kube-context", c.Context(), "--namespace", namespace}
	helm := func(args ...string) (string, error) {
		return engine.Run(exec.CommandContext(ctx, i.helm, append(args, target...)...))
	}
	description, err := chartSum(chart, values)
	if err != nil {
		return err
	}
	if out, err := helm("status", release, "--output", "json"); err == nil {
		var status struct {
			Info struct{ Status, Description string }
		}
		if err := json.Unmarshal([]byte(out), &status); err != nil {
			return err
		}
		switch {
		case status.Info.Status == "deployed" && status.Info.Description == description:
			return nil
		case strings.HasPrefix(status.Info.Status, "pending") || status.Info.Status == "uninstalling":
			// An interrupted run left the release locked.
			if _, err := helm("uninstall", release, "--no-hooks", "--wait", "--timeout", "2m"); err != nil {
				return err
			}
		}
		// An upgrade leaves CRDs as they are.
		if crds := filepath.Join(chart, "crds"); isDir(crds) {
			_, err := engine.Run(exec.CommandContext(ctx, i.lab.Kubectl, "--kubeconfig", i.lab.Kubeconfig, "--context", c.Context(),
				"apply", "--server-side", "--force-conflicts", "--filename", crds))
			if err != nil {
				return err
			}
		}
	}
	i.lab.Log("installing %s in %s …", release, c.Name)
	args := []string{"upgrade", "--install", release, chart, "--create-namespace", "--wait", "--timeout", "3m", "--description", description}
	for _, v := range values {
		if file, ok := strings.CutPrefix(v, "@"); ok {
			args = append(args, "--set-file", file)
			continue
		}
		args = append(args, "--set", v)
	}
	_, err = helm(args...)
	return err
}

func isDir(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.IsDir()
}

// chartSum returns an identifier of a chart's content and values.
func chartSum(chart string, values []string) (string, error) {
	h := sha256.New()
	for _, v := range values {
		if name, file, _ := strings.Cut(v, "="); strings.HasPrefix(v, "@") {
			sum, err := fileSum(file)
			if err != nil {
				return "", err
			}
			v = name + " " + sum
		}
		fmt.Fprintln(h, v)
	}
	err := filepath.WalkDir(chart, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		sum, err := fileSum(path)
		fmt.Fprintln(h, strings.TrimPrefix(path, chart), sum)
		return err
	})
	return "lab " + hex.EncodeToString(h.Sum(nil))[:16], err
}

// liqo installs Liqo's control plane on the members, without its network fabric:
// the lab's clusters reach each other by plain routes.
func (i *installer) liqo(ctx context.Context) error {
	module, _, err := binaries.ModuleDir(ctx, "github.com/liqotech/liqo")
	if err != nil {
		return err
	}
	return onMembers(ctx, func(ctx context.Context, c cluster.Cluster) error {
		address, err := cluster.Address(ctx, c.ControlPlane())
		if err != nil {
			return err
		}
		return i.helmUpgrade(ctx, c, "liqo", "liqo", filepath.Join(module, "deployments/liqo"),
			"tag=v1.2.0",
			"discovery.config.clusterID="+c.Name,
			"apiServer.address=https://"+address+":6443",
			"ipam.podCIDR="+c.PodCIDR,
			"ipam.serviceCIDR="+c.ServiceCIDR,
			"networking.enabled=false",
			"telemetry.enabled=false",
			"metricAgent.enabled=false",
			"proxy.enabled=false",
			"storage.enabled=false",
		)
	})
}

//go:embed kube-router.yaml
var kubeRouter string

// networkPolicies lets the clusters enforce NetworkPolicies, which the lab's own network
// does not.
func (i *installer) networkPolicies(ctx context.Context) error {
	return onAll(ctx, func(ctx context.Context, c cluster.Cluster) error {
		kubectl := func(input string, args ...string) error {
			cmd := exec.CommandContext(ctx, i.lab.Kubectl, append([]string{"--kubeconfig", i.lab.Kubeconfig, "--context", c.Context(), "--namespace", "kube-system"}, args...)...)
			cmd.Stdin = strings.NewReader(input)
			_, err := engine.Run(cmd)
			return err
		}
		manifest := strings.NewReplacer("$IMAGE", image.KubeRouterImage, "$SERVICES", c.ServiceCIDR).Replace(kubeRouter)
		if err := kubectl(manifest, "apply", "--server-side", "--force-conflicts", "--filename", "-"); err != nil {
			return err
		}
		return kubectl("", "rollout", "status", "daemonset/kube-router", "--timeout=3m")
	})
}

// metricsServer installs metrics-server on the members, from the chart in its module.
func (i *installer) metricsServer(ctx context.Context) error {
	module, _, err := binaries.ModuleDir(ctx, "sigs.k8s.io/metrics-server")
	if err != nil {
		return err
	}
	return onMembers(ctx, func(ctx context.Context, c cluster.Cluster) error {
		return i.helmUpgrade(ctx, c, "kube-system", "metrics-server", filepath.Join(module, "charts/metrics-server"),
			"image.tag="+image.MetricsServerVersion, "args={--kubelet-insecure-tls,--metric-resolution=15s}",
			"resources.requests.cpu=10m", "resources.requests.memory=32Mi")
	})
}
