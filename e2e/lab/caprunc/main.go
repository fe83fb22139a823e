// Command caprunc wraps runc on machines whose processes lack CAP_SYS_RESOURCE:
// there, runc fails for a container that requests it, rlimits, or a lower OOM
// score. caprunc removes these from the container's configuration and executes
// runc with the same arguments.
package main

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "caprunc:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	if slices.Contains(args, "create") || slices.Contains(args, "run") {
		bundle := value(args, "--bundle", "-b")
		if bundle == "" {
			bundle = "."
		}
		if err := rewrite(filepath.Join(bundle, "config.json"), func(spec map[string]any) {
			if process, ok := spec["process"].(map[string]any); ok {
				removeRequests(process)
			}
		}); err != nil {
			return err
		}
	}
	if slices.Contains(args, "exec") {
		if process := value(args, "--process", "-p"); process != "" {
			if err := rewrite(process, removeRequests); err != nil {
				return err
			}
		}
	}
	runc, err := exec.LookPath("runc")
	if err != nil {
		return err
	}
	return syscall.Exec(runc, append([]string{"runc"}, args...), os.Environ())
}

// value returns the value of a flag, given as "--flag x" or "--flag=x".
func value(args []string, names ...string) string {
	for i, arg := range args {
		for _, name := range names {
			if arg == name && i+1 < len(args) {
				return args[i+1]
			}
			if v, ok := strings.CutPrefix(arg, name+"="); ok {
				return v
			}
		}
	}
	return ""
}

// removeRequests removes from a process what needs CAP_SYS_RESOURCE.
func removeRequests(process map[string]any) {
	if sets, ok := process["capabilities"].(map[string]any); ok {
		for name, set := range sets {
			if list, ok := set.([]any); ok {
				sets[name] = slices.DeleteFunc(list, func(c any) bool { return c == "CAP_SYS_RESOURCE" })
			}
		}
	}
	delete(process, "rlimits")
	process["oomScoreAdj"] = 0
}

func rewrite(path string, change func(map[string]any)) error {
	text, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	var value map[string]any
	decoder := json.NewDecoder(strings.NewReader(string(text)))
	decoder.UseNumber() // device numbers and limits are 64-bit integers
	if err := decoder.Decode(&value); err != nil {
		return fmt.Errorf("reading %s: %w", path, err)
	}
	change(value)
	text, err = json.Marshal(value)
	if err != nil {
		return err
	}
	return os.WriteFile(path, text, 0o600)
}
