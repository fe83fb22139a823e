package v1alpha1

import (
	"encoding/json"
	"fmt"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	kjson "sigs.k8s.io/json"
)

// Undecoded is an object of a list that cannot be decoded: it was written before the CRD had the
// rule that refuses it now. The lists of this API group hold such objects apart, so that one of
// them stops nothing but itself. See package broker/undecoded for who reports them.
type Undecoded struct {
	Namespace, Name string
	UID             types.UID
	ResourceVersion string
	// Message says what cannot be decoded.
	Message string
	// Raw is the object as JSON.
	Raw json.RawMessage
}

// WithUndecoded is the part of a list that cannot be decoded.
type WithUndecoded struct {
	Undecoded []Undecoded
}

// UndecodedItems are the items that cannot be decoded.
func (l *WithUndecoded) UndecodedItems() []Undecoded { return l.Undecoded }

// decodeItems decodes a list as if it was plain. If that fails, it decodes each item on its own
// and returns those that fail: only what is no list of objects is an error.
func decodeItems[L, T any](data []byte, plain *L, items func(*L) *[]T) (undecoded []Undecoded, err error) {
	if failed := kjson.UnmarshalCaseSensitivePreserveInts(data, plain); failed == nil {
		return nil, nil
	}
	var raw struct {
		metav1.TypeMeta `json:",inline"`
		Metadata        json.RawMessage   `json:"metadata"`
		Items           []json.RawMessage `json:"items"`
	}
	if err := kjson.UnmarshalCaseSensitivePreserveInts(data, &raw); err != nil {
		return nil, err
	}
	*plain = *new(L)
	without, err := json.Marshal(map[string]any{"apiVersion": raw.APIVersion, "kind": raw.Kind, "metadata": raw.Metadata})
	if err != nil {
		return nil, err
	}
	if err := kjson.UnmarshalCaseSensitivePreserveInts(without, plain); err != nil {
		return nil, err
	}
	decoded := make([]T, 0, len(raw.Items))
	for _, item := range raw.Items {
		var one T
		failed := kjson.UnmarshalCaseSensitivePreserveInts(item, &one)
		if failed == nil {
			decoded = append(decoded, one)
			continue
		}
		var object metav1.PartialObjectMetadata
		if err := kjson.UnmarshalCaseSensitivePreserveInts(item, &object); err != nil {
			return nil, fmt.Errorf("an item that is no object: %w", err)
		}
		undecoded = append(undecoded, Undecoded{
			Namespace: object.Namespace, Name: object.Name, UID: object.UID, ResourceVersion: object.ResourceVersion, Message: failed.Error(), Raw: item,
		})
	}
	*items(plain) = decoded
	return undecoded, nil
}

// UnmarshalJSON implements json.Unmarshaler.
func (l *ClusterAdvertisementList) UnmarshalJSON(data []byte) (err error) {
	type plain ClusterAdvertisementList
	l.Undecoded, err = decodeItems(data, (*plain)(l), func(l *plain) *[]ClusterAdvertisement { return &l.Items })
	return err
}

// UnmarshalJSON implements json.Unmarshaler.
func (l *ReservationList) UnmarshalJSON(data []byte) (err error) {
	type plain ReservationList
	l.Undecoded, err = decodeItems(data, (*plain)(l), func(l *plain) *[]Reservation { return &l.Items })
	return err
}

// UnmarshalJSON implements json.Unmarshaler.
func (l *ReservationInstructionList) UnmarshalJSON(data []byte) (err error) {
	type plain ReservationInstructionList
	l.Undecoded, err = decodeItems(data, (*plain)(l), func(l *plain) *[]ReservationInstruction { return &l.Items })
	return err
}

// UnmarshalJSON implements json.Unmarshaler.
func (l *ProviderInstructionList) UnmarshalJSON(data []byte) (err error) {
	type plain ProviderInstructionList
	l.Undecoded, err = decodeItems(data, (*plain)(l), func(l *plain) *[]ProviderInstruction { return &l.Items })
	return err
}

// UnmarshalJSON implements json.Unmarshaler.
func (l *OverflowPolicyList) UnmarshalJSON(data []byte) (err error) {
	type plain OverflowPolicyList
	l.Undecoded, err = decodeItems(data, (*plain)(l), func(l *plain) *[]OverflowPolicy { return &l.Items })
	return err
}

// UnmarshalJSON implements json.Unmarshaler.
func (l *BrokerConfigList) UnmarshalJSON(data []byte) (err error) {
	type plain BrokerConfigList
	l.Undecoded, err = decodeItems(data, (*plain)(l), func(l *plain) *[]BrokerConfig { return &l.Items })
	return err
}

// UnmarshalJSON implements json.Unmarshaler.
func (l *ClusterRegistrationList) UnmarshalJSON(data []byte) (err error) {
	type plain ClusterRegistrationList
	l.Undecoded, err = decodeItems(data, (*plain)(l), func(l *plain) *[]ClusterRegistration { return &l.Items })
	return err
}
