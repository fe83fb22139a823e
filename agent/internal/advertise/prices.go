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
		return fmt.Errorf("%q is not one of cpu, memory, gpu, storage, currency and rates", kind)
	case !decimal.MatchString(value) || len(value) > maxPrice:
		return fmt.Errorf("the price of %s, %q, is not a decimal number", kind, value)
	}
	*target = value
	return nil
}

// ratesKey is the one of the rates in a ConfigMap.
const ratesKey = "rates"

// ParsePrices returns the tariff in the data of a ConfigMap. The currency is the given one if the
// data has none.
func ParsePrices(data map[string]string, currency string) (Tariff, error) {
	tariff := Tariff{Base: broker.Cost{Currency: currency}}
	var errs []error
	for _, kind := range slices.Sorted(maps.Keys(data)) {
		var err error
		switch {
		case data[kind] == "":
		case kind == ratesKey:
			tariff.Rates, err = ParseRates(data[kind])
		default:
			err = SetPrice(&tariff.Base, kind, data[kind])
		}
		errs = append(errs, err)
	}
	return tariff, errors.Join(errs...)
}

// tariff returns the one to advertise: that of the ConfigMap, if it exists, or else that of the
// options. While the ConfigMap is not valid, the tariff stays as it was.
func (p *Publisher) tariff(ctx context.Context) (Tariff, error) {
	if p.Prices.Name == "" {
		return p.Tariff, nil
	}
	var prices corev1.ConfigMap
	err := p.cached.Get(ctx, p.Prices, &prices)
	switch {
	case apierrors.IsNotFound(err):
		p.priced = p.Tariff
		return p.priced, nil
	case err != nil:
		return Tariff{}, fmt.Errorf("reading the prices of ConfigMap %s: %w", p.Prices, err)
	}
	parsed, err := ParsePrices(prices.Data, p.Tariff.Base.Currency)
	if err != nil {
		log.FromContext(ctx).WithName("advertise").Error(err, "Ignoring prices that are not valid: the previous ones apply", "configMap", p.Prices)
		p.recorder.Eventf(&prices, nil, corev1.EventTypeWarning, "PricesInvalid", "Advertise", "The previous prices apply, and after a restart those of the agent's flags: %v", err)
		return p.priced, nil
	}
	p.priced = parsed
	return parsed, nil
}
