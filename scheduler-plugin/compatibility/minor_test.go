package compatibility_test

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/apimachinery/pkg/version"

	"github.com/spillway-dev/spillway/scheduler-plugin/compatibility"
)

type server struct {
	version string
	err     error
}

func (s server) ServerVersion() (*version.Info, error) {
	return &version.Info{Major: "1", Minor: "0+", GitVersion: s.version}, s.err
}

func TestOf(t *testing.T) {
	for text, want := range map[string]compatibility.Minor{
		"v1.35.4": 35, "v1.36.3-gke.1084000": 36, "v1.37.0+k3s1": 37, "v1.38.0-alpha.2.1+abc": 38,
	} {
		if got, err := compatibility.Of(server{version: text}); err != nil || got != want {
			t.Errorf("%s: got %v (%v), want %v", text, got, err, want)
		}
	}
	for _, s := range []server{{version: "v2.1.0"}, {version: "unknown"}, {}, {version: "v1.37.0", err: errors.New("refused")}} {
		if got, err := compatibility.Of(s); err == nil {
			t.Errorf("%+v: got %v, want an error", s, got)
		}
	}
}

func TestProblem(t *testing.T) {
	for minor, want := range map[compatibility.Minor]string{
		34: "this build of Spillway supports Kubernetes 1.35 to 1.37, and the cluster has 1.34: upgrade the cluster",
		35: "", 36: "", 37: "",
		38: "this build of Spillway supports Kubernetes 1.35 to 1.37, and the cluster has 1.38: upgrade Spillway",
	} {
		if got := minor.Problem(); got != want {
			t.Errorf("%s: got %q, want %q", minor, got, want)
		}
	}
}

func TestEmulated(t *testing.T) {
	for minor, want := range map[compatibility.Minor]compatibility.Minor{33: 35, 35: 35, 36: 36, 37: 37, 40: 37} {
		if got := minor.Emulated(); got != want {
			t.Errorf("%s: got %s, want %s", minor, got, want)
		}
	}
}

// answers are what an API server says, one after the other; the last one for ever.
type answers struct{ of []string }

func (a *answers) ServerVersion() (*version.Info, error) {
	next := a.of[0]
	if len(a.of) > 1 {
		a.of = a.of[1:]
	}
	if next == "" {
		return nil, errors.New("connection refused")
	}
	return &version.Info{GitVersion: next}, nil
}

// TestAwaitUpgrade: while the servers of a control plane are upgraded one by one, they differ.
func TestAwaitUpgrade(t *testing.T) {
	var s compatibility.Server
	minor, err := s.Find(t.Context(), &answers{of: []string{"", "v1.36.1"}})
	if err != nil || minor != 36 {
		t.Fatalf("found %s (%v)", minor, err)
	}
	const was, is = "v1.36.1", "v1.37.0"
	looks := &answers{of: []string{was, is, is, is, is, was, is, "", is, is, is, is, "v1.99.0"}}
	if after := s.AwaitUpgrade(t.Context(), looks, time.Millisecond); after != 37 || looks.of[0] != "v1.99.0" {
		t.Errorf("upgraded to %s, with %v left to say", after, looks.of)
	}
	// A scheduler must not be newer than any of the servers.
	looks = &answers{of: []string{was, "v1.35.0", "v1.99.0"}}
	if after := s.AwaitUpgrade(t.Context(), looks, time.Millisecond); after != 35 || looks.of[0] != "v1.99.0" {
		t.Errorf("an older server: %s, with %v left to say", after, looks.of)
	}
}

// TestFindUnreachable: an API server that does not answer is taken for the oldest.
func TestFindUnreachable(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var s compatibility.Server
		if minor, err := s.Find(t.Context(), &answers{of: []string{""}}); err == nil || minor != compatibility.Oldest || s.Minor() != minor {
			t.Errorf("found %s (%v)", minor, err)
		}
	})
}
