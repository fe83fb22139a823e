// Package nodeconfig is what the agent tells the virtual-node program: one Secret for
// each provider that is linked with the direct driver. The agent owns and writes
// the Secret; virtual-node reads it, keeps the Node, and answers through the Node
// alone.
package nodeconfig

import (
	"encoding/json"
	"fmt"
	"net/url"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

const (
	// Component is the value of label app.kubernetes.io/component on the Secrets,
	// by which virtual-node finds them in its namespace.
	Component = "direct-link"
	// LabelComponent is the key of that label.
	LabelComponent = "app.kubernetes.io/component"

	keyConnection = "connection.json"
	keyCapacity   = "capacity.json"
)

// Config is all that virtual-node knows of one provider.
type Config struct {
	// Provider is the provider's cluster ID.
	Provider   string
	Connection Connection
	Capacity   Capacity
	// Ending asks virtual-node to let go: no pod is begun any more, those still
	// there are deleted, and then the Node. The agent deletes the Secret when the
	// Node is gone.
	Ending bool
}

// Connection is how the provider is reached, and as whom.
type Connection struct {
	// Endpoint of the provider's API server, https://host:port.
	Endpoint string `json:"endpoint"`
	// CA that its certificate is checked with, PEM.
	CA []byte `json:"ca"`
	// Namespace for the guests, the only one the token is good for.
	Namespace string `json:"namespace"`
	// Token of a ServiceAccount there. Never logged.
	Token string `json:"token"`
	// Expires is when the token ends, by the provider's clock. The agent writes a
	// new one well before.
	Expires time.Time `json:"expires"`
}

// Capacity is what the Node is to carry.
type Capacity struct {
	// Resources is the Node's exact capacity and allocatable, "pods" included.
	Resources corev1.ResourceList `json:"resources"`
	// Parked cordons the node: it is kept for a while, and takes no pod.
	Parked bool `json:"parked,omitempty"`
	// Labels of the Node beside those that every virtual node has.
	Labels map[string]string `json:"labels,omitempty"`
	// Namespaces whose pods may run there; the agent has allowed virtual-node to
	// read the ConfigMaps and Secrets of these and no others.
	Namespaces []string `json:"namespaces,omitempty"`
}

// SecretName is the name of a provider's Secret.
func SecretName(provider string) string { return secretPrefix + provider }

const secretPrefix = "spillway-direct-"

// annotationEnding is Config.Ending.
const annotationEnding = broker.Group + "/ending"

// Secret is the link as it is stored in namespace, the one of the agent and
// virtual-node.
func (l Config) Secret(namespace string) (*corev1.Secret, error) {
	connection, err := json.Marshal(l.Connection)
	if err != nil {
		return nil, fmt.Errorf("encoding the connection to %s: %w", l.Provider, err)
	}
	capacity, err := json.Marshal(l.Capacity)
	if err != nil {
		return nil, fmt.Errorf("encoding the capacity of %s: %w", l.Provider, err)
	}
	secret := &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: namespace, Name: SecretName(l.Provider),
			Labels: map[string]string{
				LabelComponent:        Component,
				broker.LabelProvider:  l.Provider,
				broker.LabelManagedBy: broker.ManagedBySpillway,
			},
		},
		Data: map[string][]byte{keyConnection: connection, keyCapacity: capacity},
	}
	if l.Ending {
		secret.Annotations = map[string]string{annotationEnding: "true"}
	}
	return secret, nil
}

// FromSecret reads a link. The error never carries what the Secret holds.
func FromSecret(secret *corev1.Secret) (Config, error) {
	l := Config{Provider: secret.Labels[broker.LabelProvider], Ending: secret.Annotations[annotationEnding] == "true"}
	if l.Provider == "" || secret.Name != SecretName(l.Provider) || secret.Labels[LabelComponent] != Component {
		return Config{}, fmt.Errorf("Secret %s is not a link: its name and labels do not agree", secret.Name)
	}
	for key, target := range map[string]any{keyConnection: &l.Connection, keyCapacity: &l.Capacity} {
		if json.Unmarshal(secret.Data[key], target) != nil {
			return Config{}, fmt.Errorf("Secret %s has no readable %s", secret.Name, key)
		}
	}
	if u, err := url.Parse(l.Connection.Endpoint); err != nil || u.Scheme != "https" || u.Host == "" {
		return Config{}, fmt.Errorf("Secret %s: the endpoint is not https://host:port", secret.Name)
	}
	return l, nil
}

// ProviderOf is the provider that a Secret of that name is for.
func ProviderOf(secretName string) string { return strings.TrimPrefix(secretName, secretPrefix) }
