package binaries_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/spillway-dev/spillway/e2e/expect"
	"github.com/spillway-dev/spillway/e2e/lab/binaries"
	"github.com/spillway-dev/spillway/scheduler-plugin/compatibility"
)

// TestSupported: there are control planes of exactly the minors that Spillway supports.
func TestSupported(t *testing.T) {
	var want []string
	for minor := compatibility.Oldest; minor <= compatibility.Newest; minor++ {
		want = append(want, minor.String())
	}
	if have := binaries.Supported(); !slices.Equal(have, want) {
		t.Errorf("control planes have %q, Spillway supports %q", have, want)
	}
}

func TestWantedMinors(t *testing.T) {
	oldest, newest := compatibility.Oldest.String(), compatibility.Newest.String()
	for value, want := range map[string]binaries.Minors{
		"": {Consumers: newest, Others: newest}, oldest: {Consumers: oldest, Others: oldest},
		oldest + "," + newest: {Consumers: oldest, Others: newest},
	} {
		t.Setenv("KUBERNETES", value)
		have, err := binaries.WantedMinors()
		expect.NoError(t, err)
		if have != want {
			t.Errorf("KUBERNETES=%s: have %v, want %v", value, have, want)
		}
	}
	for _, value := range []string{"1.34", "v1.36", "1.36.3", "1.36,", ",", "1.35,1.36,1.37", "1.35, 1.37"} {
		t.Setenv("KUBERNETES", value)
		if _, err := binaries.WantedMinors(); err == nil || !strings.Contains(err.Error(), strings.Join(binaries.Supported(), ", ")) {
			t.Errorf("KUBERNETES=%s: have %v, want an error that says what is supported", value, err)
		}
	}
}

func TestAtWantedMinors(t *testing.T) {
	for value, want := range map[string][]string{
		"":          {"etcd", "kube-apiserver", "kube-scheduler"},
		"1.36":      {"etcd", "kube-apiserver-1.36", "kube-scheduler"},
		"1.35,1.37": {"etcd", "kube-apiserver-1.35", "kube-apiserver", "kube-scheduler"},
	} {
		t.Setenv("KUBERNETES", value)
		have, err := binaries.AtWantedMinors("etcd", "kube-apiserver", "kube-scheduler")
		if expect.NoError(t, err); !slices.Equal(have, want) {
			t.Errorf("KUBERNETES=%s: have %q, want %q", value, have, want)
		}
	}
}
