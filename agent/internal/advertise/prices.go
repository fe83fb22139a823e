package advertise

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/log"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

var (
	decimal  = regexp.MustCompile(`^[0-9]+(\.[0-9]+)?$`)
	currency = regexp.MustCompile(`^[A-Z]{3}$`)
)

// maxPrice is the number of characters of a price that an advertisement may have.
const maxPrice = 32

// SetPrice sets the price per hour of a kind of resource (cpu, memory, gpu or storage), or
// the currency of all prices.
func SetPrice(cost *broker.Cost, kind, value string) error {
	amounts := map[string]*string{"cpu": &cost.CPUCost, "memory": &cost.MemoryCost, "gpu": &cost.GPUCost, "storage": &cost.StorageCost}
	target, known := amounts[kind]
	switch {
	case kind == "currency" && !currency.MatchString(value):
		return fmt.Errorf("currency %q is not an ISO 4217 code, such as EUR", value)
	case kind == "currency":
		cost.Currency = value
		return nil
	case !known:
		return fmt.Errorf("%q is not one of cpu, memory, gpu, storage and currency", kind)
	case !decimal.MatchString(value) || len(value) > maxPrice:
		return fmt.Errorf("the price of %s, %q, is not a decimal number", kind, value)
	}
	*target = value
	return nil
}

// ParsePrices returns the prices in the data of a ConfigMap, nil if it has none. The
// currency is the given one if the data has none.
func ParsePrices(data map[string]string, currency string) (*broker.Cost, error) {
	cost := broker.Cost{Currency: currency}
	var errs []error
	for _, kind := range slices.Sorted(maps.Keys(data)) {
		if data[kind] != "" {
			errs = append(errs, SetPrice(&cost, kind, data[kind]))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	if cost == (broker.Cost{Currency: cost.Currency}) {
		return nil, nil
	}
	return &cost, nil
}

// cost returns the prices to advertise: those of the ConfigMap, if it exists, or else those
// of the terms. While the ConfigMap is not valid, the prices stay as they were.
func (p *Publisher) cost(ctx context.Context) (*broker.Cost, error) {
	if p.Prices.Name == "" {
		return p.Terms.Cost, nil
	}
	var prices corev1.ConfigMap
	err := p.cached.Get(ctx, p.Prices, &prices)
	switch {
	case apierrors.IsNotFound(err):
		p.priced = p.Terms.Cost
		return p.priced, nil
	case err != nil:
		return nil, fmt.Errorf("reading the prices of ConfigMap %s: %w", p.Prices, err)
	}
	parsed, err := ParsePrices(prices.Data, p.Currency)
	if err != nil {
		log.FromContext(ctx).WithName("advertise").Error(err, "Ignoring prices that are not valid: the previous ones apply", "configMap", p.Prices)
		return p.priced, nil
	}
	p.priced = parsed
	return parsed, nil
}
