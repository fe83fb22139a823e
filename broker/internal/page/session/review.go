package session

import (
	"context"
	"errors"
	"fmt"

	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// User is who is signed in, and which objects of the broker's namespace they may list.
type User struct {
	Name                   string
	Clusters, Reservations bool
}

// ErrToken means that the API server does not know a token, or not any more.
var ErrToken = errors.New("the hub does not accept the token")

// Reviewer asks the API server of the hub.
type Reviewer struct {
	Client client.Client
	// Namespace of the broker's objects.
	Namespace string
}

// Review returns whose a token is. The error is ErrToken if it is no one's.
func (r Reviewer) Review(ctx context.Context, token string) (User, error) {
	review := &authenticationv1.TokenReview{Spec: authenticationv1.TokenReviewSpec{Token: token}}
	if err := r.Client.Create(ctx, review); err != nil {
		return User{}, fmt.Errorf("reviewing a token: %w", err)
	}
	if !review.Status.Authenticated {
		return User{}, ErrToken
	}
	user := User{Name: review.Status.User.Username}
	for resource, may := range map[string]*bool{"clusteradvertisements": &user.Clusters, "reservations": &user.Reservations} {
		var err error
		if *may, err = r.mayList(ctx, review.Status.User, resource); err != nil {
			return User{}, fmt.Errorf("reviewing the access of %s: %w", user.Name, err)
		}
	}
	return user, nil
}

func (r Reviewer) mayList(ctx context.Context, user authenticationv1.UserInfo, resource string) (bool, error) {
	extra := map[string]authorizationv1.ExtraValue{}
	for key, values := range user.Extra {
		extra[key] = authorizationv1.ExtraValue(values)
	}
	review := &authorizationv1.SubjectAccessReview{Spec: authorizationv1.SubjectAccessReviewSpec{
		User: user.Username, UID: user.UID, Groups: user.Groups, Extra: extra,
		ResourceAttributes: &authorizationv1.ResourceAttributes{Namespace: r.Namespace, Verb: "list", Group: broker.Group, Version: broker.GroupVersion.Version, Resource: resource},
	}}
	err := r.Client.Create(ctx, review)
	return err == nil && review.Status.Allowed && !review.Status.Denied, err
}
