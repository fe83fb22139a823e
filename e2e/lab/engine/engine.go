// Package engine provides the lab's container engine: a running docker or else, as
// root on Debian, one that it installs, starts and later stops.
package engine

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/spillway-dev/spillway/e2e/lab/binaries"
)

const (
	pidFile = "/var/run/docker.pid"
	// marker holds the PID of the dockerd that the lab started and may stop.
	marker = "/var/run/spillway-lab.pid"
)

// packages are the Debian packages that provide the programs the lab needs.
var packages = map[string]string{
	"apt-get":     "apt",
	"debootstrap": "debootstrap",
	"iptables":    "iptables",
	"ip":          "iproute2",
	"runc":        "runc",
	"containerd":  "containerd",
	"dockerd":     "docker.io",
	"docker":      "docker.io",
}

// Ensure returns once docker is running and the kernel's limits suffice. Its error
// says what is missing.
func Ensure(ctx context.Context, log binaries.Log) error {
	running := Running(ctx)
	if os.Geteuid() != 0 {
		if running {
			return errors.New("the lab adds routes between clusters: run it as root (it will use the docker that is running)")
		}
		return errors.New("docker is not running: start it, or run this as root on Debian to install and start it")
	}
	if err := installPackages(ctx, log, running); err != nil {
		return err
	}
	if !running {
		if err := start(ctx, log); err != nil {
			return err
		}
	}
	return raiseLimits()
}

// Running reports whether docker responds.
func Running(ctx context.Context) bool {
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	return exec.CommandContext(ctx, "docker", "version", "--format", "{{.Server.Version}}").Run() == nil
}

func installPackages(ctx context.Context, log binaries.Log, dockerRuns bool) error {
	var missing []string
	for program, pkg := range packages {
		if dockerRuns && (program == "dockerd" || program == "containerd" || program == "runc") {
			continue
		}
		if _, err := exec.LookPath(program); err != nil {
			missing = append(missing, pkg)
		}
	}
	if len(missing) == 0 {
		return nil
	}
	if _, err := os.Stat("/etc/debian_version"); err != nil {
		return fmt.Errorf("the lab needs %s, and installs it on Debian only: install it, then run this again", strings.Join(missing, ", "))
	}
	log("installing %s from Debian …", strings.Join(missing, ", "))
	// The packages must not start their services: the lab starts its own.
	env := append(os.Environ(), "DEBIAN_FRONTEND=noninteractive", "RUNLEVEL=1")
	for _, args := range [][]string{{"update"}, append([]string{"install", "-y", "--no-install-recommends"}, missing...)} {
		cmd := exec.CommandContext(ctx, "apt-get", args...)
		cmd.Env = env
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("apt-get %s: %w\n%s", args[0], err, out)
		}
	}
	return nil
}

// raiseLimits raises the kernel limits that many kubelets and kube-proxies exceed.
func raiseLimits() error {
	for name, minimum := range map[string]int{
		"fs/inotify/max_user_instances": 8192,
		"fs/inotify/max_user_watches":   1048576,
	} {
		path := filepath.Join("/proc/sys", name)
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		if current, err := strconv.Atoi(strings.TrimSpace(string(text))); err == nil && current >= minimum {
			continue
		}
		if err := os.WriteFile(path, []byte(strconv.Itoa(minimum)), 0); err != nil {
			return fmt.Errorf("raising %s to %d: %w", name, minimum, err)
		}
	}
	return nil
}

func start(ctx context.Context, log binaries.Log) error {
	if err := clearLeftovers(ctx, log); err != nil {
		return err
	}
	args := []string{"--log-level=warn"}
	if lacksSysResource() {
		cache, err := binaries.CacheDir()
		if err != nil {
			return err
		}
		dir := filepath.Join(cache, "lab")
		if err := binaries.Own(ctx, log, dir, "./e2e/lab/caprunc"); err != nil {
			return err
		}
		log("CAP_SYS_RESOURCE is missing: containers run without it")
		args = append(args, "--add-runtime=caprunc="+filepath.Join(dir, "caprunc"), "--default-runtime=caprunc")
	}
	logFile, err := os.OpenFile("/var/log/spillway-lab-dockerd.log", os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o640)
	if err != nil {
		return err
	}
	defer logFile.Close()
	log("starting dockerd …")
	cmd := exec.Command("dockerd", args...)
	cmd.Stdout, cmd.Stderr = logFile, logFile
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("starting dockerd: %w", err)
	}
	if err := os.WriteFile(marker, []byte(strconv.Itoa(cmd.Process.Pid)), 0o644); err != nil {
		return err
	}
	exited := make(chan error, 1)
	go func() { exited <- cmd.Wait() }()
	deadline := time.After(60 * time.Second)
	for !Running(ctx) {
		select {
		case err := <-exited:
			return fmt.Errorf("dockerd exited (%v); see %s", err, logFile.Name())
		case <-deadline:
			return fmt.Errorf("dockerd did not respond for 60 s; see %s", logFile.Name())
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(200 * time.Millisecond):
		}
	}
	return nil
}

func lacksSysResource() bool {
	const capSysResource = 24
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return false
	}
	for line := range strings.Lines(string(status)) {
		if hex, ok := strings.CutPrefix(line, "CapEff:"); ok {
			caps, err := strconv.ParseUint(strings.TrimSpace(hex), 16, 64)
			return err == nil && caps&(1<<capSysResource) == 0
		}
	}
	return false
}

// Stop stops the dockerd that the lab started and cleans up after it. Any other
// dockerd is left alone.
func Stop(ctx context.Context, log binaries.Log) error {
	if _, err := os.Stat(marker); err != nil {
		return nil
	}
	if pid, ok := readPID(marker); ok && isDockerd(pid) {
		log("stopping dockerd …")
		syscall.Kill(pid, syscall.SIGTERM)
		for deadline := time.Now().Add(20 * time.Second); isDockerd(pid) && time.Now().Before(deadline); {
			time.Sleep(100 * time.Millisecond)
		}
		if isDockerd(pid) {
			syscall.Kill(pid, syscall.SIGKILL)
		}
	}
	if err := clearLeftovers(ctx, log); err != nil {
		return err
	}
	exec.CommandContext(ctx, "ip", "link", "delete", "docker0").Run()
	return os.Remove(marker)
}

// clearLeftovers removes what a killed dockerd leaves behind and what would keep
// the next one from starting: its containerd, shims, mounts and PID files.
func clearLeftovers(ctx context.Context, log binaries.Log) error {
	if pid, ok := readPID(pidFile); ok && isDockerd(pid) {
		return fmt.Errorf("dockerd (process %d) is running but does not respond: stop it, then run this again", pid)
	}
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return err
	}
	for _, entry := range entries {
		pid, err := strconv.Atoi(entry.Name())
		if err != nil {
			continue
		}
		line := commandLine(pid)
		shim := strings.Contains(line, "containerd-shim") && strings.Contains(line, "moby")
		if shim || strings.Contains(line, "/docker/containerd/containerd.toml") {
			log("killing process %d, left by an earlier dockerd", pid)
			syscall.Kill(pid, syscall.SIGKILL)
		}
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return err
	}
	for line := range strings.Lines(string(mounts)) {
		fields := strings.Fields(line)
		if len(fields) < 5 {
			continue
		}
		if at := fields[4]; strings.HasPrefix(at, "/run/docker/") || strings.HasPrefix(at, "/var/run/docker/") ||
			strings.HasPrefix(at, "/var/lib/docker/") {
			syscall.Unmount(at, syscall.MNT_DETACH)
		}
	}
	for _, path := range []string{pidFile, "/var/run/docker/containerd/containerd.pid", "/run/docker/containerd/containerd.pid"} {
		if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	return nil
}

func readPID(path string) (int, bool) {
	text, err := os.ReadFile(path)
	if err != nil {
		return 0, false
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(text)))
	return pid, err == nil && pid > 1
}

func isDockerd(pid int) bool {
	name, _, _ := strings.Cut(commandLine(pid), " ")
	return filepath.Base(name) == "dockerd"
}

func commandLine(pid int) string {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	if err != nil {
		return ""
	}
	return string(bytes.ReplaceAll(text, []byte{0}, []byte{' '}))
}

// Docker runs a docker command and returns its standard output.
func Docker(ctx context.Context, args ...string) (string, error) {
	return Run(exec.CommandContext(ctx, "docker", args...))
}

// Run runs a command and returns its standard output, trimmed. An error contains
// the command's output.
func Run(cmd *exec.Cmd) (string, error) {
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		output := strings.TrimSpace(stderr.String() + "\n" + stdout.String())
		if len(output) > 4000 {
			output = "… " + output[len(output)-4000:]
		}
		return strings.TrimSpace(stdout.String()), fmt.Errorf("%s: %w\n%s", strings.Join(cmd.Args, " "), err, output)
	}
	return strings.TrimSpace(stdout.String()), nil
}
