package health

import (
	"cmp"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/utils/ptr"

	"github.com/spillway-dev/spillway/agent/internal/explain"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// Kinds that only Check reads.
const (
	Webhooks        = "mutatingwebhookconfigurations.admissionregistration.k8s.io"
	EndpointSlices  = "endpointslices.discovery.k8s.io"
	NetworkPolicies = "networkpolicies.networking.k8s.io"
	Secrets         = "secrets"
	DaemonSets      = "daemonsets.apps"
)

// IdentitySecret has the certificate by which the broker knows the agent.
const IdentitySecret = "spillway-agent-tls"

// Installation is what a caller can see of how Spillway was installed.
type Installation struct {
	Observed
	// Version of Kubernetes, and why Spillway does not run on it, empty if it does.
	Version, VersionProblem string
	// Kinds of Spillway that the API server serves.
	Kinds []string
	// Permissions that programs need, or before an installation the caller.
	Permissions     []Permission
	Webhooks        []admissionv1.MutatingWebhookConfiguration
	EndpointSlices  []discoveryv1.EndpointSlice
	NetworkPolicies []networkingv1.NetworkPolicy
	// Identity is the Secret of the agent's certificate, nil if it could not be read.
	Identity *corev1.Secret
	// Trial of the webhook, nil without one.
	Trial *Trial
	// OptedIn is how many namespaces are.
	OptedIn int
	// Plugin is the version of this program, empty if it is not a released one.
	Plugin string
	// LacksFields are the fields of Spillway's kinds that this program knows and the API server does not.
	LacksFields []string
	// ClockAhead is by how much the clock of the API server is ahead of this machine's; nil if unknown.
	ClockAhead *time.Duration
	// NetworkPlugins are the DaemonSets of kube-system.
	NetworkPlugins []appsv1.DaemonSet
	// Endpoints are those of Addresses, as this machine sees them.
	Endpoints []Endpoint
}

// Permission is whether someone may do something.
type Permission struct {
	// Who is a ServiceAccount of Spillway, or empty for the caller.
	Who, What string
	Allowed   bool
	// Unknown is why that is not known.
	Unknown string
}

// Trial is a dry run of a new pod: whether it was steered, or what else became of it.
type Trial struct {
	Namespace string
	Steered   bool
	Unknown   string
}

// SteeringWebhook steers new pods.
const SteeringWebhook = "steering." + broker.Group

// Steering returns that webhook, nil if it is not there.
func (in *Installation) Steering() *admissionv1.MutatingWebhook {
	for i := range in.Webhooks {
		for j := range in.Webhooks[i].Webhooks {
			if w := &in.Webhooks[i].Webhooks[j]; in.Webhooks[i].Name == Scheduler && w.Name == SteeringWebhook {
				return w
			}
		}
	}
	return nil
}

// consumerKinds are those of the agent's chart, hubKinds the others of the broker's.
var (
	consumerKinds = []string{"ClusterAdvertisement", "OverflowPolicy", "ProviderInstruction", "Reservation", "ReservationInstruction"}
	hubKinds      = []string{"BrokerConfig", "ClusterRegistration"}
)

// Check says whether Spillway was installed well; with pre, whether it can be.
func Check(in *Installation, pre bool) Report {
	s := &status{Observed: &in.Observed, Report: Report{Cluster: in.ClusterID(), Unreadable: in.Unreadable}}
	s.version(in)
	if pre {
		s.permissions(in)
		s.crds(in, pre)
	} else {
		s.crds(in, pre)
		s.programs(in)
		s.permissions(in)
		s.webhook(in)
		s.hub()
		s.reach(in)
		s.clocks(in)
		s.certificates(in)
		s.networks(in)
		s.namespaces(in)
	}
	for i := range s.Steps {
		s.Steps[i].See = see[s.Steps[i].Name]
	}
	s.finish()
	return s.Report
}

// see is where the documentation has more about each step.
var see = map[string]string{
	"Kubernetes": "charts/README.md#supported-versions-of-kubernetes", "CRDs": "charts/README.md#upgrade", "Programs": "charts/README.md#troubleshooting",
	"Permissions": "charts/README.md#permissions-and-api-priority", "Webhook": "charts/README.md#network", "Hub": "broker/README.md#join-and-removal-of-clusters",
	"Reach": "charts/README.md#network", "Clocks": "charts/README.md#replicas-and-failures", "Certificates": "broker/README.md#join-and-removal-of-clusters",
	"Network": "charts/README.md#network", "Namespaces": "scheduler-plugin/README.md#opt-in",
}

func (s *status) version(in *Installation) {
	const name = "Kubernetes"
	if in.VersionProblem != "" {
		s.fail(name, in.VersionProblem, explain.Fix{Message: "See Supported versions of Kubernetes in charts/README.md#supported-versions-of-kubernetes."})
		return
	}
	s.step(name, explain.OK, in.Version+" is supported")
}

// crds: whether the kinds are there; before an installation, that they are not.
func (s *status) crds(in *Installation, pre bool) {
	const name = "CRDs"
	var missing []string
	for _, kind := range consumerKinds {
		if !slices.Contains(in.Kinds, kind) {
			missing = append(missing, kind)
		}
	}
	if _, _, hub := s.program(Broker); hub && !s.unreadable(Deployments) {
		for _, kind := range hubKinds {
			if !slices.Contains(in.Kinds, kind) {
				missing = append(missing, kind)
			}
		}
	}
	switch {
	case pre && len(missing) == len(consumerKinds):
		s.step(name, explain.OK, "none is there yet: helm installs them")
	case pre:
		s.step(name, explain.Waiting, "they are there: helm leaves them as they are; apply those of this version (charts/README.md#upgrade)")
	case len(missing) > 0:
		s.fail(name, "the API server does not serve "+strings.Join(missing, ", "), explain.Fix{Message: "Apply the CRDs, see charts/README.md#upgrade.",
			Commands: []string{"kubectl apply --server-side --force-conflicts -f charts/agent/crds"}})
	case len(in.LacksFields) > 0:
		s.fail(name, fmt.Sprintf("they are older than this program: they lack %s%s", in.LacksFields[0], more(len(in.LacksFields)-1)), explain.Fix{Message: "Apply the CRDs of one version with the programs, see charts/README.md#upgrade.",
			Commands: []string{"kubectl apply --server-side --force-conflicts -f charts/agent/crds"}})
	default:
		s.step(name, explain.OK, fmt.Sprintf("%d kinds of %s, with all fields that this program knows", len(in.Kinds), broker.GroupVersion))
	}
}

func more(n int) string {
	if n <= 0 {
		return ""
	}
	return fmt.Sprintf(" and %d more", n)
}

// programs: whether they run, of one version.
func (s *status) programs(in *Installation) {
	const name = "Programs"
	if s.unreadable(Deployments) {
		s.unknown(name, Deployments)
		return
	}
	var details []explain.Detail
	var versions []string
	bad := ""
	for _, program := range []string{Broker, Agent, Scheduler, VirtualNode} {
		state, message, present := s.program(program)
		if !present {
			continue
		}
		d := explain.Detail{State: state, Subject: program, Message: strings.TrimPrefix(message, program+": ")}
		if deployment := s.deployment(program); deployment != nil {
			version := deployment.Labels["app.kubernetes.io/version"]
			d.Message = strings.TrimPrefix(version+", ", ", ") + d.Message
			if version != "" && !slices.Contains(versions, version) {
				versions = append(versions, version)
			}
		}
		if state == explain.Failed && bad == "" {
			bad = program
		}
		details = append(details, d)
	}
	switch {
	case len(details) == 0:
		s.fail(name, "none is installed in namespace "+s.System, explain.Fix{Message: "Install the charts, see charts/README.md#install, or name the namespace by --system-namespace."})
	case bad != "":
		s.fail(name, bad+" does not work", s.logsOf(bad), details...)
	case len(versions) > 1:
		s.fail(name, "they are of several versions: "+strings.Join(versions, ", "), explain.Fix{Message: "Upgrade all charts to one version, see charts/README.md#upgrade."}, details...)
	case in.Plugin != "" && len(versions) == 1 && versions[0] != in.Plugin:
		s.step(name, explain.Waiting, fmt.Sprintf("%d run, of version %s, and this program is of version %s: use one of the same", len(details), versions[0], in.Plugin), details...)
	default:
		s.step(name, explain.OK, fmt.Sprintf("%d run", len(details)), details...)
	}
}

// permissions of the programs, or of the caller.
func (s *status) permissions(in *Installation) {
	const name = "Permissions"
	var details []explain.Detail
	unknown, missing := "", 0
	for _, p := range in.Permissions {
		if p.Unknown != "" {
			unknown = p.Unknown
		} else if !p.Allowed {
			missing++
			details = append(details, explain.Detail{State: explain.Failed, Subject: cmp.Or(p.Who, "you"), Message: "may not " + p.What})
		}
	}
	switch {
	case missing > 0:
		s.fail(name, fmt.Sprintf("%d of %d are missing", missing, len(in.Permissions)),
			explain.Fix{Message: "Install with the permissions of cluster-admin, or repair the chart's roles by an upgrade: see charts/README.md#permissions-and-api-priority."}, details...)
	case unknown != "":
		s.step(name, explain.Unknown, "not known: "+unknown)
	case len(in.Permissions) == 0:
		s.step(name, explain.Skipped, "")
	default:
		s.step(name, explain.OK, fmt.Sprintf("all %d are there", len(in.Permissions)))
	}
}

// webhook: whether new pods are steered.
func (s *status) webhook(in *Installation) {
	const name = "Webhook"
	w := in.Steering()
	_, _, scheduler := s.program(Scheduler)
	switch {
	case s.unreadable(Webhooks):
		s.unknown(name, Webhooks)
	case w == nil && scheduler:
		s.fail(name, "there is no webhook "+Scheduler+": new pods are not steered, and do not overflow", explain.Fix{Message: "Upgrade the agent's chart, see charts/README.md#upgrade."})
	case w == nil:
		s.step(name, explain.Skipped, "none: pods of this cluster do not overflow (value scheduler.mode of the agent's chart)")
	case in.Trial != nil && in.Trial.Steered:
		s.step(name, explain.OK, "a dry run in namespace "+in.Trial.Namespace+" was steered")
	case in.Trial != nil && in.Trial.Unknown == "":
		s.fail(name, "a dry run in namespace "+in.Trial.Namespace+" was not steered: new pods stay with the default scheduler", s.logsOf(Scheduler))
	default:
		s.called(name, in, &w.ClientConfig)
	}
}

// called judges a webhook by what it names: whether an address answers, only a dry run shows.
func (s *status) called(name string, in *Installation, config *admissionv1.WebhookClientConfig) {
	message := Scheduler + " is registered"
	ready := func(e discoveryv1.EndpointSlice) bool {
		return e.Labels[discoveryv1.LabelServiceName] == config.Service.Name && slices.ContainsFunc(e.Endpoints, func(p discoveryv1.Endpoint) bool { return p.Conditions.Ready == nil || *p.Conditions.Ready })
	}
	switch service := config.Service; {
	case service == nil:
		message += " at " + ptr.Deref(config.URL, "")
	case service.Namespace != s.System:
		message += " at Service " + service.Namespace + "/" + service.Name
	case s.unreadable(EndpointSlices):
	case !slices.ContainsFunc(in.EndpointSlices, ready):
		s.fail(name, "no ready pod answers for Service "+service.Name+": new pods stay with the default scheduler", s.logsOf(Scheduler))
		return
	default:
		message += ", and pods answer for it"
	}
	if in.Trial != nil {
		message += "; a dry run in namespace " + in.Trial.Namespace + " " + in.Trial.Unknown
	}
	s.step(name, explain.OK, message)
}

// renewBefore is how long before its end a certificate is to have been renewed.
const renewBefore = 7 * 24 * time.Hour

// certificates: when they end.
func (s *status) certificates(in *Installation) {
	const name = "Certificates"
	var details []explain.Detail
	bad := false
	addEnd := func(subject string, end time.Time, err error) {
		d := explain.Detail{State: explain.OK, Subject: subject, Message: "ends on " + end.UTC().Format(time.DateOnly)}
		switch {
		case err != nil:
			d.State, d.Message = explain.Failed, err.Error()
		case end.Before(s.Now):
			d.State, d.Message = explain.Failed, "ended on "+end.UTC().Format(time.DateOnly)
		case end.Before(s.Now.Add(renewBefore)):
			d.State = explain.Waiting
		}
		bad = bad || d.State == explain.Failed
		details = append(details, d)
	}
	add := func(subject string, content []byte) {
		end, err := expiry(content)
		addEnd(subject, end, err)
	}
	if in.Identity != nil {
		add("agent, for the broker", in.Identity.Data[corev1.TLSCertKey])
	}
	for i := range in.Webhooks {
		if w := &in.Webhooks[i]; len(w.Webhooks) > 0 && len(w.Webhooks[0].ClientConfig.CABundle) > 0 && strings.HasPrefix(w.Name, "spillway-") {
			add("authority of webhook "+w.Name, w.Webhooks[0].ClientConfig.CABundle)
		}
	}
	for _, e := range in.Endpoints {
		if !e.Ends.IsZero() {
			addEnd("serving, of "+e.Subject, e.Ends, nil)
		}
	}
	switch {
	case bad:
		s.fail(name, "one is of no use", explain.Fix{Message: "The agent renews its own at two thirds of its life: see why it has not, or join again (broker/README.md#join-and-removal-of-clusters). Those of webhooks: upgrade the chart.",
			Commands: []string{fmt.Sprintf("kubectl -n %s logs deploy/%s --tail=50", s.System, Agent)}}, details...)
	case len(details) == 0:
		s.unknown(name, Secrets, Webhooks)
	default:
		s.step(name, explain.OK, fmt.Sprintf("%d are valid", len(details)), details...)
	}
}

// expiry returns the earliest end of the certificates in PEM.
func expiry(content []byte) (end time.Time, err error) {
	for block, rest := pem.Decode(content); block != nil; block, rest = pem.Decode(rest) {
		if block.Type != "CERTIFICATE" {
			continue
		}
		certificate, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			return end, fmt.Errorf("it cannot be read: %w", err)
		}
		if end.IsZero() || certificate.NotAfter.Before(end) {
			end = certificate.NotAfter
		}
	}
	if end.IsZero() {
		return end, errors.New("there is none")
	}
	return end, nil
}

// enforcers are network plugins that enforce NetworkPolicies, by the names of their DaemonSets.
var enforcers = []string{"antrea-agent", "calico-node", "canal", "cilium", "kindnet", "kube-router", "ovnkube-node", "weave-net"}

// networks: the policies of the programs, and who may enforce them. Whether they are enforced is seen
// only by a connection that is to fail.
func (s *status) networks(in *Installation) {
	const name = "Network"
	enforced := "no network plugin is seen in kube-system that is known to enforce them"
	for i := range in.NetworkPlugins {
		if plugin := in.NetworkPlugins[i].Name; slices.Contains(enforcers, plugin) {
			enforced = plugin + " runs, which enforces them unless it is configured otherwise"
		}
	}
	if s.unreadable(DaemonSets) {
		enforced = "whether the network plugin enforces them cannot be seen from here"
	}
	switch n := len(in.NetworkPolicies); {
	case s.unreadable(NetworkPolicies):
		s.unknown(name, NetworkPolicies)
	case n == 0:
		s.step(name, explain.Waiting, "no NetworkPolicy limits the programs in namespace "+s.System+": value networkPolicy.enabled of the charts makes them; "+enforced)
	default:
		s.step(name, explain.OK, fmt.Sprintf("%d NetworkPolicies in namespace %s; %s", n, s.System, enforced))
	}
}

// namespaces: whether any is opted in.
func (s *status) namespaces(in *Installation) {
	const name = "Namespaces"
	_, _, scheduler := s.program(Scheduler)
	switch {
	case s.unreadable(explain.Namespaces):
		s.unknown(name, explain.Namespaces)
	case in.OptedIn == 0 && scheduler:
		s.step(name, explain.Waiting, "none is opted in: "+explain.OptIn("NAME")+" (scheduler-plugin/README.md#opt-in)")
	default:
		s.step(name, explain.OK, fmt.Sprintf("%d opted in", in.OptedIn))
	}
}
