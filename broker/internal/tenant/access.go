package tenant

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/protocol"
	"github.com/spillway-dev/spillway/broker/protocol/objects"
)

// madeWithin is how long the broker may take to make a namespace.
const madeWithin = time.Minute

// Approve approves a cluster, unless an operator has revoked it. Without a key it gets an invitation
// whose token does not exist: who has the shared token must not join with the ID.
func Approve(ctx context.Context, hub client.Client, namespace, cluster string) error {
	if !protocol.ValidClusterID(cluster) {
		return fmt.Errorf("%q is not a cluster ID: it must have 1 to %d lower-case letters, digits and dashes, and must not begin or end with a dash", cluster, protocol.MaxClusterID)
	}
	registration := &broker.ClusterRegistration{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: cluster, Labels: map[string]string{broker.LabelManagedBy: broker.ManagedBySpillway}}}
	_, err := controllerutil.CreateOrUpdate(ctx, hub, registration, func() error {
		if registration.Spec.Approval == broker.ApprovalRevoked {
			return fmt.Errorf("its access is revoked: to let it in again, first run kubectl -n %s delete clusterregistration %s", namespace, cluster)
		}
		registration.Spec.ClusterID, registration.Spec.Approval = cluster, broker.ApprovalApproved
		if registration.Status.KeyFingerprint == "" && registration.Spec.Invitation == nil {
			hash := make([]byte, sha256.Size)
			// It never fails.
			_, _ = rand.Read(hash)
			registration.Spec.Invitation = &broker.Invitation{TokenHash: hex.EncodeToString(hash), Expires: metav1.Now()}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("approving cluster %s: %w", cluster, err)
	}
	return nil
}

// Kubeconfig returns access to the namespace of a cluster, once the broker has made it, for a time.
// The server is that of the configuration if it is empty.
func Kubeconfig(ctx context.Context, hub client.Client, config *rest.Config, server, cluster string, ttl time.Duration) ([]byte, error) {
	account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: objects.Namespace(cluster), Name: ServiceAccount}}
	token := &authenticationv1.TokenRequest{}
	err := wait.PollUntilContextTimeout(ctx, time.Second, madeWithin, true, func(ctx context.Context) (bool, error) {
		token.Spec = authenticationv1.TokenRequestSpec{ExpirationSeconds: ptr.To(int64(ttl / time.Second))}
		err := hub.SubResource("token").Create(ctx, account, token)
		if apierrors.IsNotFound(err) {
			return false, nil
		}
		return err == nil, err
	})
	if wait.Interrupted(err) {
		err = errors.New("there is none: does the broker run with --broker-interface=kubernetes?")
	}
	if err != nil {
		return nil, fmt.Errorf("creating a token of ServiceAccount %s in namespace %s: %w", account.Name, account.Namespace, err)
	}
	ca := config.CAData
	if len(ca) == 0 && config.CAFile != "" {
		if ca, err = os.ReadFile(config.CAFile); err != nil {
			return nil, fmt.Errorf("reading the CA of the API server: %w", err)
		}
	}
	if server == "" {
		server = config.Host
	}
	access := clientcmdapi.NewConfig()
	access.Clusters["hub"] = &clientcmdapi.Cluster{Server: server, CertificateAuthorityData: ca}
	access.AuthInfos[cluster] = &clientcmdapi.AuthInfo{Token: token.Status.Token}
	access.Contexts["hub"] = &clientcmdapi.Context{Cluster: "hub", AuthInfo: cluster, Namespace: account.Namespace}
	access.CurrentContext = "hub"
	return clientcmd.Write(*access)
}
