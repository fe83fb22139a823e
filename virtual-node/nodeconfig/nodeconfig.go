// Package nodeconfig is the configuration of the virtual-node program: one Secret
// for each provider that is peered with the direct driver. The agent owns and
// writes the Secret; virtual-node reads it, keeps the Node, and reports through
// the Node only.
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
	Component = "virtual-node-config"
	// LabelComponent is the key of that label.
	LabelComponent = "app.kubernetes.io/component"

	keyConnection = "connection.json"
	keyCapacity   = "capacity.json"
)

// Config is all that virtual-node knows about one provider.
type Config struct {
	// Provider is the provider's cluster ID.
	Provider   string
	Connection Connection
	Capacity   Capacity
	// Terminating makes virtual-node start no more pods, delete those that exist,
	// and then the Node. The agent deletes the Secret when the Node is gone.
	Terminating bool
}

// Connection is how the provider is reached, and as whom.
type Connection struct {
	// Endpoint of the provider's API server, https://host:port.
	Endpoint string `json:"endpoint"`
	// CA that its certificate is checked with, PEM.
	CA []byte `json:"ca"`
	// Namespace for the guests, the only one that the token is valid for.
	Namespace string `json:"namespace"`
	// Token of a ServiceAccount there. Never logged.
	Token string `json:"token"`
	// Expires is when the token expires, by the provider's clock. The agent writes
	// a new one well before.
	Expires time.Time `json:"expires"`
}

// Capacity is what the Node is to provide.
type Capacity struct {
	// Resources is the Node's exact capacity and allocatable, "pods" included.
	Resources corev1.ResourceList `json:"resources"`
	// Labels of the Node beside those that every virtual node has.
	Labels map[string]string `json:"labels,omitempty"`
	// Namespaces whose pods may run there; virtual-node may read the ConfigMaps and
	// Secrets of these and no others.
	Namespaces []string `json:"namespaces,omitempty"`
}

// SecretName is the name of a provider's Secret.
func SecretName(provider string) string { return secretPrefix + provider }

const secretPrefix = "spillway-direct-"

// annotationTerminating is Config.Terminating.
const annotationTerminating = broker.Group + "/terminating"

// Secret is the Secret that stores the configuration in a namespace.
func (c Config) Secret(namespace string) (*corev1.Secret, error) {
	connection, err := json.Marshal(c.Connection)
	if err != nil {
		return nil, fmt.Errorf("encoding the connection to %s: %w", c.Provider, err)
	}
	capacity, err := json.Marshal(c.Capacity)
	if err != nil {
		return nil, fmt.Errorf("encoding the capacity of %s: %w", c.Provider, err)
	}
	secret := &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: namespace, Name: SecretName(c.Provider),
			Labels: map[string]string{
				LabelComponent:        Component,
				broker.LabelProvider:  c.Provider,
				broker.LabelManagedBy: broker.ManagedBySpillway,
			},
		},
		Data: map[string][]byte{keyConnection: connection, keyCapacity: capacity},
	}
	if c.Terminating {
		secret.Annotations = map[string]string{annotationTerminating: "true"}
	}
	return secret, nil
}

// FromSecret reads a configuration. The error never contains values of the Secret.
func FromSecret(secret *corev1.Secret) (Config, error) {
	c := Config{Provider: secret.Labels[broker.LabelProvider], Terminating: secret.Annotations[annotationTerminating] == "true"}
	if c.Provider == "" || secret.Name != SecretName(c.Provider) || secret.Labels[LabelComponent] != Component {
		return Config{}, fmt.Errorf("Secret %s is not a virtual node configuration: its name and labels do not match", secret.Name)
	}
	for key, target := range map[string]any{keyConnection: &c.Connection, keyCapacity: &c.Capacity} {
		if json.Unmarshal(secret.Data[key], target) != nil {
			return Config{}, fmt.Errorf("Secret %s has no readable %s", secret.Name, key)
		}
	}
	if u, err := url.Parse(c.Connection.Endpoint); err != nil || u.Scheme != "https" || u.Host == "" {
		return Config{}, fmt.Errorf("Secret %s: the endpoint is not https://host:port", secret.Name)
	}
	return c, nil
}

// ProviderOf is the inverse of SecretName.
func ProviderOf(secretName string) string { return strings.TrimPrefix(secretName, secretPrefix) }
