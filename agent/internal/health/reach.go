package health

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/spillway-dev/spillway/agent/internal/explain"
)

// Endpoint is an address that programs connect to.
type Endpoint struct {
	// Subject is the broker, or a provider's API server.
	Subject, URL string
	// Problem is why it does not answer this machine, empty if it does. Ends is when its certificate does,
	// zero if that is unknown.
	Problem string
	Ends    time.Time
}

// subjectOf names the API server of a provider.
func subjectOf(provider string) string { return "API server of " + provider }

// Addresses are those of the broker, by the agent's flag, and of the API servers of the providers whose
// capacity is in use.
func (o *Observed) Addresses() (all []Endpoint) {
	providers := map[string]string{}
	for i := range o.Reservations {
		for _, a := range o.Reservations[i].Status.Allocations {
			if a.Endpoint != "" && o.Reservations[i].Namespace != o.System {
				providers[a.Cluster] = a.Endpoint
			}
		}
	}
	if url := o.flagOf(Agent, "--broker-url="); url != "" {
		all = append(all, Endpoint{Subject: "the broker", URL: url})
	}
	for _, provider := range slices.Sorted(maps.Keys(providers)) {
		all = append(all, Endpoint{Subject: subjectOf(provider), URL: providers[provider]})
	}
	return all
}

// flagOf returns the value of a program's flag, empty if it is not set.
func (o *Observed) flagOf(program, flag string) (value string) {
	if d := o.deployment(program); d != nil {
		for _, c := range d.Spec.Template.Spec.Containers {
			for _, arg := range c.Args {
				if set, found := strings.CutPrefix(arg, flag); found {
					value = set
				}
			}
		}
	}
	return value
}

// reach: whether the agent can connect to the API servers of providers, as it reports itself, and
// what answers this machine.
func (s *status) reach(in *Installation) {
	const name = "Reach"
	var details []explain.Detail
	var lost []string
	if own := s.own(); own != nil {
		lost = own.Spec.Unreachable
	}
	for _, provider := range lost {
		details = append(details, explain.Detail{State: explain.Failed, Subject: subjectOf(provider), Message: "the agent cannot connect to it"})
	}
	for _, e := range in.Endpoints {
		d := explain.Detail{State: explain.OK, Subject: e.Subject, Message: e.URL + " answers this machine"}
		if e.Problem != "" {
			d.State, d.Message = explain.Unknown, e.URL+" does not answer this machine, which need not reach it: "+e.Problem
		}
		details = append(details, d)
	}
	switch {
	case len(lost) > 0:
		s.fail(name, fmt.Sprintf("the agent cannot connect to the API servers of %d providers", len(lost)), explain.Fix{
			Message: "Let this cluster connect to them, and check the provider's value apiServer.endpoint: see charts/README.md#network.", Commands: []string{fmt.Sprintf("kubectl -n %s logs deploy/%s --tail=50", s.System, Agent)}}, details...)
	case s.own() == nil && s.unreadable(Advertisements):
		s.unknown(name, Advertisements)
	case s.own() == nil:
		s.step(name, explain.Skipped, "no agent reports what it can connect to", details...)
	default:
		s.step(name, explain.OK, "the agent reports no provider that it cannot connect to", details...)
	}
}

// clocks: whether this machine, the API server, and the programs agree on the time.
func (s *status) clocks(in *Installation) {
	const name = "Clocks"
	if in.ClockAhead == nil {
		s.step(name, explain.Unknown, "not known: the API server does not say what time it is")
		return
	}
	server := s.Now.Add(*in.ClockAhead)
	details := []explain.Detail{{State: explain.OK, Subject: "this machine", Message: apart(-*in.ClockAhead) + " the API server"}}
	if in.ClockAhead.Abs() > clocksDiffer {
		details[0].State = explain.Waiting
	}
	wrong := ""
	ahead := func(subject string, at time.Time) {
		if by := at.Sub(server); by > clocksDiffer {
			details = append(details, explain.Detail{State: explain.Failed, Subject: subject, Message: apart(by) + " the API server"})
			wrong = cmp.Or(wrong, subject)
		}
	}
	for i := range s.Leases {
		if renewed := ptr.Deref(s.Leases[i].Spec.RenewTime, metav1.MicroTime{}); !renewed.IsZero() && slices.Contains([]string{Broker, Agent, Scheduler, VirtualNode}, s.Leases[i].Name) {
			ahead("the node of "+s.Leases[i].Name, renewed.Time)
		}
	}
	for _, a := range s.advertised() {
		ahead("cluster "+a.Spec.ClusterID, a.Spec.Timestamp.Time)
	}
	switch {
	case wrong != "":
		s.fail(name, "the clock of "+wrong+" is wrong, or that of the API server", explain.Fix{Message: "Let all nodes get their time from NTP: certificates, and what is too old, depend on it."}, details...)
	case details[0].State == explain.Waiting:
		s.step(name, explain.Waiting, "the clock of this machine is wrong, or that of the API server: ages that are printed here are wrong by that", details...)
	default:
		s.step(name, explain.OK, "no clock is seen that is ahead of the API server's", details...)
	}
}

// apart words by how much a clock is ahead, or behind if it is negative.
func apart(by time.Duration) string {
	by = by.Round(time.Second)
	switch {
	case by > 0:
		return by.String() + " ahead of"
	case by < 0:
		return (-by).String() + " behind"
	}
	return "the same as"
}
