package main

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/url"
	"path/filepath"
	"slices"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/clientcmd"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/protocol"
	"github.com/spillway-dev/spillway/e2e/playground/process"
)

func init() { benches["asks_1000_clusters"] = asks }

const (
	askClusters  = 1000
	askConsumers = 10
	// asksEach is within the burst that the broker allows a consumer.
	asksEach = 50
	// asksAtOnce is how many requests each consumer has in progress.
	asksAtOnce = 4
)

// asks measures how many requests for capacity the broker places in a second with 1,000
// clusters that advertise, from the call until the consumer's stream shows the placement,
// and the bytes between the broker and its API server for each.
func asks() error {
	ctx, cancel := context.WithTimeout(context.Background(), 15*time.Minute)
	defer cancel()
	d, err := deploy(ctx)
	if err != nil {
		return err
	}
	defer d.stop()
	metered, err := d.meter()
	if err != nil {
		return err
	}
	defer metered.listener.Close()
	r, err := d.replica(ctx, "broker")
	if err != nil {
		return err
	}
	defer r.Kill()
	if err := poll(ctx, "the broker to lead", r.leads); err != nil {
		return err
	}
	if err := d.loadCA(ctx); err != nil {
		return err
	}
	// The providers do not answer: none is given up meanwhile.
	config := &broker.BrokerConfig{ObjectMeta: metav1.ObjectMeta{Namespace: broker.SystemNamespace, Name: "default"}}
	config.Spec.ProofDeadline = &metav1.Duration{Duration: 20 * time.Minute}
	if err := d.api.Create(ctx, config); err != nil {
		return err
	}
	streaming, stop := context.WithCancel(ctx)
	defer stop()
	if err := d.advertiseAll(ctx, streaming, r); err != nil {
		return err
	}
	consumers := make([]*protocol.Client, askConsumers)
	placed := make([]chan protocol.ConsumerView, askConsumers)
	for i := range consumers {
		if consumers[i], err = d.agent(ctx, r.url, fmt.Sprint("consumer-", i)); err != nil {
			return err
		}
		defer consumers[i].Close()
		placed[i] = make(chan protocol.ConsumerView, 1<<14)
		go consumers[i].Watch(streaming, protocol.RoleRequester, func(event protocol.Event) {
			for _, view := range event.Consumer {
				if len(view.Status.Allocations) > 0 {
					placed[i] <- view
				}
			}
		})
	}
	const total = askConsumers * asksEach
	bytes, cpu, began := metered.bytes.Load(), process.CPUTime(r.Pid()), time.Now()
	latencies := make(chan time.Duration, total)
	group, asking := errgroup.WithContext(ctx)
	for i, consumer := range consumers {
		group.Go(func() error { return askAll(asking, consumer, placed[i], latencies) })
	}
	if err := group.Wait(); err != nil {
		return err
	}
	took := time.Since(began)
	bytes, cpu = metered.bytes.Load()-bytes, process.CPUTime(r.Pid())-cpu
	close(latencies)
	var sorted []time.Duration
	for latency := range latencies {
		sorted = append(sorted, latency)
	}
	slices.Sort(sorted)
	fmt.Printf("%d requests of %d consumers, %d at once: p50 %s, p99 %s, %s of CPU in the broker for each\n", total, askConsumers, askConsumers*asksAtOnce,
		sorted[total/2].Round(time.Millisecond), sorted[total*99/100].Round(time.Millisecond), (cpu / total).Round(10*time.Microsecond))
	lines.Time("asks_1000_clusters", total/took.Seconds(), "requests/s", ">= 60")
	lines.Count("asks_1000_clusters_kilobytes", float64(bytes)/total/1000, "kB/request", 60)
	return nil
}

// advertiseAll makes the clusters advertise until streaming ends, and returns when each
// has once.
func (d *deployment) advertiseAll(ctx, streaming context.Context, r *replica) error {
	group, registering := errgroup.WithContext(ctx)
	group.SetLimit(16)
	for i := range askClusters {
		group.Go(func() error {
			id := fmt.Sprintf("cluster-%05d", i)
			client, err := d.agent(registering, r.url, id)
			if err != nil {
				return err
			}
			spec := offer(id)
			advertise := func(ctx context.Context) error {
				spec.Sequence++
				spec.Timestamp = metav1.Now().Rfc3339Copy()
				_, err := client.PublishAdvertisement(ctx, spec)
				return err
			}
			if err := retry(registering, advertise); err != nil {
				return fmt.Errorf("advertising %s: %w", id, err)
			}
			go func() {
				for wait(streaming, 30*time.Second) == nil {
					if err := advertise(streaming); err != nil && streaming.Err() == nil {
						fmt.Println("advertising:", err)
					}
				}
				client.Close()
			}()
			return nil
		})
	}
	if err := group.Wait(); err != nil {
		return err
	}
	fmt.Println(askClusters, "clusters advertise")
	// Until their accounts are written.
	return wait(ctx, 5*time.Second)
}

// askAll makes a consumer's requests, a few at once, and waits until each is placed.
func askAll(ctx context.Context, consumer *protocol.Client, placed chan protocol.ConsumerView, latencies chan time.Duration) error {
	began := map[string]time.Time{}
	type asked struct {
		id    string
		began time.Time
		err   error
	}
	answers := make(chan asked, asksEach)
	seen, done, sent := map[string]time.Time{}, 0, 0
	for done < asksEach {
		for ; sent < asksEach && sent-done < asksAtOnce; sent++ {
			go func() {
				began := time.Now()
				id, err := request(ctx, &agent{client: consumer})
				answers <- asked{id, began, err}
			}()
		}
		finish := func(id string) {
			from, isKnown := began[id]
			at, isPlaced := seen[id]
			if isKnown && isPlaced {
				latencies <- at.Sub(from)
				delete(began, id)
				done++
			}
		}
		select {
		case answer := <-answers:
			if answer.err != nil {
				return answer.err
			}
			began[answer.id] = answer.began
			finish(answer.id)
		case view := <-placed:
			if _, known := seen[view.ID]; !known {
				seen[view.ID] = time.Now()
				finish(view.ID)
			}
		case <-time.After(time.Minute):
			return fmt.Errorf("%d of %d requests were placed", done, asksEach)
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

// meter counts the bytes of the connections through it.
type meter struct {
	listener net.Listener
	bytes    atomic.Int64
}

// meter makes the brokers reach their API server through a meter.
func (d *deployment) meter() (*meter, error) {
	config, err := clientcmd.LoadFromFile(d.kubeconfig)
	if err != nil {
		return nil, err
	}
	cluster := config.Clusters[config.Contexts[config.CurrentContext].Cluster]
	server, err := url.Parse(cluster.Server)
	if err != nil {
		return nil, err
	}
	m := &meter{}
	if m.listener, err = net.Listen("tcp", "127.0.0.1:0"); err != nil {
		return nil, err
	}
	go func() {
		for {
			connection, err := m.listener.Accept()
			if err != nil {
				return
			}
			go m.forward(connection, server.Host)
		}
	}()
	cluster.Server = "https://" + m.listener.Addr().String()
	d.kubeconfig = filepath.Join(d.dir, "metered.kubeconfig")
	return m, clientcmd.WriteToFile(*config, d.kubeconfig)
}

func (m *meter) forward(from net.Conn, address string) {
	defer from.Close()
	to, err := net.Dial("tcp", address)
	if err != nil {
		return
	}
	defer to.Close()
	go func() {
		_, _ = io.Copy(to, io.TeeReader(from, m))
		_ = to.Close()
	}()
	_, _ = io.Copy(from, io.TeeReader(to, m))
}

func (m *meter) Write(counted []byte) (int, error) {
	m.bytes.Add(int64(len(counted)))
	return len(counted), nil
}
