// Command render prints the manifests of a chart as helm template does. It is helm's
// engine without the clients of registries and clusters, most of what helm compiles.
package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path"

	"github.com/spf13/pflag"

	"helm.sh/helm/v3/pkg/chart/loader"
	"helm.sh/helm/v3/pkg/chartutil"
	"helm.sh/helm/v3/pkg/engine"
	"helm.sh/helm/v3/pkg/releaseutil"
	"helm.sh/helm/v3/pkg/strvals"
)

func main() {
	if err := run(os.Args[1:], os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "render:", err)
		os.Exit(1)
	}
}

func run(args []string, out io.Writer) error {
	flags := pflag.NewFlagSet("render", pflag.ContinueOnError)
	namespace := flags.String("namespace", "default", "Namespace of the release.")
	crds := flags.Bool("include-crds", false, "Whether to print the chart's CRDs, too.")
	set := flags.StringArray("set", nil, "Values as key=value, may be repeated.")
	setFile := flags.StringArray("set-file", nil, "Values as key=file, may be repeated.")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if flags.NArg() != 2 {
		return errors.New("usage: render NAME CHART [flags]")
	}
	values, err := parse(*set, *setFile)
	if err != nil {
		return err
	}
	chart, err := loader.Load(flags.Arg(1))
	if err != nil {
		return err
	}
	if err := chartutil.ProcessDependenciesWithMerge(chart, values); err != nil {
		return err
	}
	release := chartutil.ReleaseOptions{Name: flags.Arg(0), Namespace: *namespace, Revision: 1, IsInstall: true}
	// Checks the values against the chart's schema.
	input, err := chartutil.ToRenderValues(chart, values, release, nil)
	if err != nil {
		return err
	}
	files, err := engine.Render(chart, input)
	if err != nil {
		return err
	}
	delete(files, path.Join(chart.Name(), "templates", "NOTES.txt"))
	hooks, manifests, err := releaseutil.SortManifests(files, nil, releaseutil.InstallOrder)
	if err != nil {
		return err
	}
	if *crds {
		for _, crd := range chart.CRDObjects() {
			fmt.Fprintf(out, "---\n# Source: %s\n%s\n", crd.Filename, crd.File.Data)
		}
	}
	for _, m := range manifests {
		fmt.Fprintf(out, "---\n# Source: %s\n%s\n", m.Name, m.Content)
	}
	for _, h := range hooks {
		fmt.Fprintf(out, "---\n# Source: %s\n%s\n", h.Path, h.Manifest)
	}
	return nil
}

// parse returns the values of the flags, those of files last, as helm does.
func parse(set, setFile []string) (map[string]any, error) {
	values := map[string]any{}
	for _, value := range set {
		if err := strvals.ParseInto(value, values); err != nil {
			return nil, fmt.Errorf("parsing --set: %w", err)
		}
	}
	read := func(name []rune) (any, error) {
		text, err := os.ReadFile(string(name))
		return string(text), err
	}
	for _, value := range setFile {
		if err := strvals.ParseIntoFile(value, values, read); err != nil {
			return nil, fmt.Errorf("parsing --set-file: %w", err)
		}
	}
	return values, nil
}
