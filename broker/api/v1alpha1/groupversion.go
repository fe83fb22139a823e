package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// Group is the API group of every Spillway object.
const Group = "broker.fluidos.eu"

// GroupVersion is the group and version of the objects in this package.
var GroupVersion = schema.GroupVersion{Group: Group, Version: "v1alpha1"}

var schemeBuilder = runtime.NewSchemeBuilder(func(scheme *runtime.Scheme) error {
	scheme.AddKnownTypes(GroupVersion,
		&ClusterAdvertisement{}, &ClusterAdvertisementList{},
		&Reservation{}, &ReservationList{},
		&ReservationInstruction{}, &ReservationInstructionList{},
		&ProviderInstruction{}, &ProviderInstructionList{},
		&OverflowPolicy{}, &OverflowPolicyList{},
		&BrokerConfig{}, &BrokerConfigList{},
		&ClusterRegistration{}, &ClusterRegistrationList{},
	)
	metav1.AddToGroupVersion(scheme, GroupVersion)
	return nil
})

// AddToScheme registers this package's types with a scheme.
var AddToScheme = schemeBuilder.AddToScheme
