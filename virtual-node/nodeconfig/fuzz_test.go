package nodeconfig

import (
	"testing"

	"github.com/spillway-dev/spillway/e2e/expect"
)

// FuzzFromSecret reads arbitrary Secrets. What is accepted can be written and read again.
func FuzzFromSecret(f *testing.F) {
	f.Add([]byte(`{"endpoint":"https://paris.test:6443","ca":"eA==","namespace":"a","token":"t","expires":"2026-01-02T03:04:05Z"}`), []byte(`{"resources":{"cpu":"4","pods":"10"},"namespaces":["shop"]}`))
	f.Add([]byte(`{"endpoint":"http://paris.test"}`), []byte(`{"resources":{"cpu":"1e1000"}}`))
	f.Add([]byte(`null`), []byte(``))
	f.Fuzz(func(t *testing.T, connection, capacity []byte) {
		secret, err := Config{Provider: "paris"}.Secret("agents")
		expect.NoError(t, err)
		secret.Data[keyConnection], secret.Data[keyCapacity] = connection, capacity
		config, err := FromSecret(secret)
		if err != nil {
			return
		}
		again, err := config.Secret("agents")
		if err != nil {
			return // such as a time that JSON does not have
		}
		_, err = FromSecret(again)
		expect.NoError(t, err)
	})
}
