package confine

import (
	"slices"
	"strings"
	"testing"

	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// What is not allowed stays denied by the other policy, in both directions.
func TestAllowed(t *testing.T) {
	ingress, egress := networkingv1.PolicyTypeIngress, networkingv1.PolicyTypeEgress
	own := []networkingv1.NetworkPolicyPeer{{NamespaceSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"of": "rome"}}}}
	for name, c := range map[string]struct {
		networks     Networks
		types        []networkingv1.PolicyType
		from, to     int
		egressRules  int
		withResolver bool
	}{
		"nothing":      {types: []networkingv1.PolicyType{ingress, egress}},
		"ingress only": {networks: Networks{IngressFrom: []string{"10.0.0.0/8"}}, types: []networkingv1.PolicyType{ingress}, from: 1},
		"egress only":  {networks: Networks{EgressTo: []string{"10.0.0.0/8", "fd00::/8"}}, types: []networkingv1.PolicyType{egress}, to: 2, egressRules: 1},
		"own pods":     {networks: Networks{Peers: own}, types: []networkingv1.PolicyType{ingress, egress}, from: 1, to: 1, egressRules: 1},
		"DNS":          {networks: Networks{DNS: true}, types: []networkingv1.PolicyType{egress}, to: 1, egressRules: 1, withResolver: true},
		"all": {
			networks: Networks{IngressFrom: []string{"10.0.0.0/8"}, EgressTo: []string{"10.0.0.0/8"}, Peers: own, DNS: true},
			types:    []networkingv1.PolicyType{ingress, egress}, from: 2, to: 2, egressRules: 2, withResolver: true,
		},
	} {
		t.Run(name, func(t *testing.T) {
			got := c.networks.allowed()
			if !slices.Equal(got.PolicyTypes, c.types) || len(got.Egress) != c.egressRules {
				t.Fatalf("policy types %v and %d egress rules, want %v and %d", got.PolicyTypes, len(got.Egress), c.types, c.egressRules)
			}
			if from := len(got.Ingress); from > 1 || from == 1 && len(got.Ingress[0].From) != c.from || from == 0 && c.from > 0 {
				t.Errorf("ingress: %+v, want one rule with %d peers", got.Ingress, c.from)
			}
			if c.egressRules > 0 && len(got.Egress[0].To) != c.to {
				t.Errorf("egress: %+v, want %d peers", got.Egress, c.to)
			}
			for i, rule := range got.Egress {
				// A rule without peers would allow everything.
				if last := i == len(got.Egress)-1; len(rule.To) == 0 || len(rule.Ports) > 0 != (c.withResolver && last) {
					t.Errorf("egress rule %d: %+v", i, rule)
				}
			}
		})
	}
}

func TestValidate(t *testing.T) {
	for cidr, want := range map[string]string{"10.0.0.0/8": "", "fd00::/8": "", "10.1.0.0/8": "use 10.0.0.0/8", "everything": "is not a network", "10.0.0.1": "is not a network"} {
		for _, n := range []Networks{{IngressFrom: []string{cidr}}, {EgressTo: []string{cidr}}} {
			err := n.Validate()
			if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
				t.Errorf("%s: %v, want %q", cidr, err, want)
			}
		}
	}
}

// Nothing may be opened to the outside, whatever the number of pods.
func TestObjects(t *testing.T) {
	hard := Objects{Sources: 40, Services: 3}.Hard()
	for name, want := range map[string]int64{"count/configmaps": 40, "count/secrets": 40, "count/services": 3, "services.nodeports": 0, "services.loadbalancers": 0, "count/persistentvolumeclaims": 0} {
		for listed, amount := range hard {
			if string(listed) == name && amount.Value() != want {
				t.Errorf("%s: %d, want %d", name, amount.Value(), want)
			}
		}
	}
	if len(hard) != 6 {
		t.Errorf("%v", hard)
	}
}
