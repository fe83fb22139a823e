package environment

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/e2e/playground/cluster"
	"github.com/spillway-dev/spillway/e2e/playground/process"
)

// tokenLife exceeds the life of any playground.
const tokenLife = 7 * 24 * 3600

// run runs a Deployment of one replica and one container as a process, as a kubelet
// would: it writes the container's volumes to files, requests a token for its
// ServiceAccount, and starts the program with the container's arguments. Ports are
// replaced by free ones of 127.0.0.1, paths by those of the files. Override replaces
// arguments by name; ports returns the chosen port of each flag.
func run(ctx context.Context, c *cluster.Cluster, d *appsv1.Deployment, program string, override map[string]string) (ports map[string]int, _ error) {
	pod := d.Spec.Template.Spec
	if len(pod.Containers) != 1 {
		return nil, fmt.Errorf("Deployment %s has %d containers, expected one", d.Name, len(pod.Containers))
	}
	container := pod.Containers[0]
	kubeconfig := accessPath(c, d.Name)
	dir := filepath.Dir(kubeconfig)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	if err := writeAccess(ctx, c, pod.ServiceAccountName, kubeconfig); err != nil {
		return nil, err
	}
	if err := writeVolumes(ctx, c, dir, pod, container); err != nil {
		return nil, fmt.Errorf("writing the volumes of %s: %w", d.Name, err)
	}
	ports = map[string]int{}
	var args []string
	for _, arg := range container.Args {
		flag, value, _ := strings.Cut(arg, "=")
		name := strings.TrimLeft(flag, "-")
		switch replaced, ok := override[name]; {
		case ok:
			value = replaced
		case strings.HasPrefix(value, ":"):
			port, err := cluster.FreePort()
			if err != nil {
				return nil, err
			}
			ports[name], value = port, cluster.Address(port)
		case slices.ContainsFunc(container.VolumeMounts, func(m corev1.VolumeMount) bool { return within(value, m.MountPath) }):
			value = filepath.Join(dir, value)
		}
		args = append(args, flag+"="+value)
	}
	for name, value := range override {
		if !slices.ContainsFunc(args, func(arg string) bool { return strings.HasPrefix(arg, "--"+name+"=") }) {
			args = append(args, "--"+name+"="+value)
		}
	}
	_, err := c.Run(process.Spec{
		Name: d.Name, Path: program, Args: args,
		Env: append(environment(container), "KUBECONFIG="+kubeconfig),
	})
	return ports, err
}

// accessPath is the kubeconfig of one of the charts' programs.
func accessPath(c *cluster.Cluster, program string) string {
	return filepath.Join(c.Dir(), program, "kubeconfig")
}

// writeAccess writes a kubeconfig with a token of a ServiceAccount.
func writeAccess(ctx context.Context, c *cluster.Cluster, account, path string) error {
	token, err := c.Set.CoreV1().ServiceAccounts(Namespace).CreateToken(ctx, account, &authenticationv1.TokenRequest{
		Spec: authenticationv1.TokenRequestSpec{ExpirationSeconds: ptr.To(int64(tokenLife))},
	}, metav1.CreateOptions{})
	if err != nil {
		return fmt.Errorf("getting a token for ServiceAccount %s in %s: %w", account, c.Name, err)
	}
	return c.WriteKubeconfig(path, &clientcmdapi.AuthInfo{Token: token.Status.Token})
}

// writeVolumes writes the Secrets and ConfigMaps that a container mounts to
// <dir>/<mount path>/<file>.
func writeVolumes(ctx context.Context, c *cluster.Cluster, dir string, pod corev1.PodSpec, container corev1.Container) error {
	for _, mount := range container.VolumeMounts {
		i := slices.IndexFunc(pod.Volumes, func(v corev1.Volume) bool { return v.Name == mount.Name })
		if i < 0 {
			return fmt.Errorf("volume %s does not exist", mount.Name)
		}
		files := map[string][]byte{}
		var items []corev1.KeyToPath
		switch volume := pod.Volumes[i]; {
		case volume.Secret != nil:
			var secret corev1.Secret
			if err := c.Client.Get(ctx, client.ObjectKey{Namespace: Namespace, Name: volume.Secret.SecretName}, &secret); err != nil {
				return err
			}
			files, items = secret.Data, volume.Secret.Items
		case volume.ConfigMap != nil:
			var config corev1.ConfigMap
			if err := c.Client.Get(ctx, client.ObjectKey{Namespace: Namespace, Name: volume.ConfigMap.Name}, &config); err != nil {
				return err
			}
			for name, text := range config.Data {
				files[name] = []byte(text)
			}
			items = volume.ConfigMap.Items
		case volume.EmptyDir != nil, volume.PersistentVolumeClaim != nil:
		default:
			return fmt.Errorf("volume %s has an unsupported type", mount.Name)
		}
		target := filepath.Join(dir, mount.MountPath)
		if err := os.MkdirAll(target, 0o700); err != nil {
			return err
		}
		if items == nil {
			for name := range files {
				items = append(items, corev1.KeyToPath{Key: name, Path: name})
			}
		}
		for _, item := range items {
			content, ok := files[item.Key]
			if !ok {
				return fmt.Errorf("volume %s has no key %s", mount.Name, item.Key)
			}
			if err := os.WriteFile(filepath.Join(target, item.Path), content, 0o600); err != nil {
				return err
			}
		}
	}
	return nil
}

// environment resolves a container's env for a process of this machine.
func environment(container corev1.Container) []string {
	var env []string
	for _, v := range container.Env {
		value := v.Value
		if v.ValueFrom != nil && v.ValueFrom.ResourceFieldRef != nil && v.ValueFrom.ResourceFieldRef.Resource == "limits.memory" {
			value = strconv.FormatInt(container.Resources.Limits.Memory().Value(), 10)
		}
		if v.ValueFrom != nil && v.ValueFrom.FieldRef != nil {
			switch v.ValueFrom.FieldRef.FieldPath {
			case "metadata.namespace":
				value = Namespace
			case "status.podIP", "status.hostIP":
				value = "127.0.0.1"
			}
		}
		env = append(env, v.Name+"="+value)
	}
	return env
}

// within reports whether path is dir or below it.
func within(path, dir string) bool {
	return path == dir || strings.HasPrefix(path, strings.TrimSuffix(dir, "/")+"/")
}
