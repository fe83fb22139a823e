package main

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spillway-dev/spillway/e2e/controlplane"
)

func TestFlags(t *testing.T) {
	t.Setenv("POD_NAMESPACE", "hub")
	o, err := parse([]string{"--tls-san=a.test, 192.0.2.1", "--tls-san", "b.test"})
	if err != nil {
		t.Fatal(err)
	}
	if o.namespace != "hub" || !slices.Equal(o.names, []string{"a.test", "192.0.2.1", "b.test"}) {
		t.Fatalf("got %+v", o)
	}
	for _, arguments := range [][]string{{"--broker-interface=kubernetes"}, {"something"}} {
		if _, err := parse(arguments); err == nil {
			t.Errorf("%v was taken", arguments)
		}
	}
}

// TestRun starts the broker as main does, and stops it.
func TestRun(t *testing.T) {
	probes := freeAddress(t)
	o, err := parse([]string{"--namespace=default", "--listen=127.0.0.1:0", "--metrics-bind-address=0", "--health-probe-bind-address=" + probes, "--leader-elect"})
	if err != nil {
		t.Fatal(err)
	}
	config := controlplane.Start(t)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	ended := make(chan error, 1)
	go func() { ended <- run(ctx, config, o) }()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	deadline := time.After(30 * time.Second)
	for last := error(nil); ; {
		if last = probe("http://" + probes + "/readyz"); last == nil {
			break
		}
		select {
		case <-tick.C:
		case err := <-ended:
			t.Fatalf("it ended: %v", err)
		case <-deadline:
			t.Fatalf("it is not ready: %v", last)
		}
	}
	cancel()
	select {
	case err := <-ended:
		if err != nil {
			t.Fatalf("it ended with: %v", err)
		}
	case <-time.After(20 * time.Second):
		t.Fatal("it did not end")
	}
}

func probe(url string) error {
	response, err := http.Get(url)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		return fmt.Errorf("%s says %s", strings.TrimPrefix(url, "http://"), response.Status)
	}
	return nil
}

func freeAddress(t *testing.T) string {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	return listener.Addr().String()
}
