package settings_test

import (
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"strings"
	"testing"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// tests are the tests that fail if the broker ignores a field of the BrokerConfig, by package and
// name. They set the field while the broker runs.
var tests = map[string]string{
	"weights.resources":             "reservation.TestConfigWeights",
	"weights.cost":                  "reservation.TestConfigWeights",
	"weights.reliability":           "reservation.TestConfigReliability",
	"weights.latency":               "reservation.TestConfigLatency",
	"exchangeRates.currency":        "reservation.TestConfigExchangeRates",
	"exchangeRates.rate":            "reservation.TestConfigExchangeRates",
	"exchangeRates.date":            "reservation.TestConfigExchangeRates",
	"staleAfter":                    "reservation.TestConfigStaleAfter",
	"freshFor":                      "reservation.TestConfigFreshFor",
	"maxDuration":                   "reservation.TestConfigMaxDuration",
	"defaultDuration":               "reservation.TestConfigDefaultDuration",
	"defaultLease":                  "reservation.TestConfigDefaultLease",
	"proofDeadline":                 "reservation.TestConfigProofDeadline",
	"retryAfter":                    "reservation.TestConfigRetryAfter",
	"queueing":                      "reservation.TestConfigQueueing",
	"keepFreeFor":                   "reservation.TestConfigKeepFreeFor",
	"joining.admission":             "identity.testAdmission",
	"joining.allowed":               "identity.testAdmission",
	"quotas.clusters":               "identity.testClusterQuota",
	"quotas.reservationsPerCluster": "server.testQuota",
	"quotas.capacityPerCluster":     "reservation.TestConfigCapacityPerCluster",
	"quotas.reservations":           "server.testQuota",
	"quotas.reservationBytes":       "server.testQuota",
	"quotas.relayBytesPerCluster":   "server.TestConfigRelayBytes",
	"quotas.streamsPerCluster":      "server.TestConfigStreams",
	"quotas.writesPerSecond":        "server.TestWritesAreLimited",
	"quotas.writeBurst":             "server.TestWritesAreLimited",
	"quotas.maxPriority":            "reservation.TestConfigMaxPriority",
}

// TestEachFieldIsTested: a field of the BrokerConfig that no test names may be ignored.
func TestEachFieldIsTested(t *testing.T) {
	left := map[string]bool{}
	for field := range tests {
		left[field] = true
	}
	for _, field := range fields(reflect.TypeFor[broker.BrokerConfigSpec](), "") {
		delete(left, field)
		of, name, _ := strings.Cut(tests[field], ".")
		if name == "" {
			t.Errorf("no test is named for %s: write one that fails if the broker ignores it", field)
		} else if !declares(t, filepath.Join("..", of), name) {
			t.Errorf("%s names test %s, which does not exist", field, tests[field])
		}
	}
	for field := range left {
		t.Errorf("there is no field %s", field)
	}
}

// fields are the paths of the fields of a type that have no fields of this API themselves.
func fields(of reflect.Type, path string) (all []string) {
	for field := range of.Fields() {
		name, _, _ := strings.Cut(field.Tag.Get("json"), ",")
		kind := field.Type
		for kind.Kind() == reflect.Pointer || kind.Kind() == reflect.Slice {
			kind = kind.Elem()
		}
		if kind.Kind() == reflect.Struct && kind.PkgPath() == of.PkgPath() && kind != reflect.TypeFor[broker.ResourceQuantities]() {
			all = append(all, fields(kind, path+name+".")...)
		} else {
			all = append(all, path+name)
		}
	}
	return all
}

// declares reports whether a test of a package declares a function or method.
func declares(t *testing.T, dir, name string) bool {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dir, "*_test.go"))
	expect.NoError(t, err)
	declaration := regexp.MustCompile(`(?m)^func (\([^)]*\) )?` + name + `\(`)
	for _, file := range files {
		content, err := os.ReadFile(file)
		expect.NoError(t, err)
		if declaration.Match(content) {
			return true
		}
	}
	return false
}
