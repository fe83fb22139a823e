package main

import "testing"

// TestLocale: other terminals get ASCII.
func TestLocale(t *testing.T) {
	for locale, want := range map[string]bool{"en_US.UTF-8": true, "C.utf8": true, "C": false, "de_DE.ISO-8859-1": false, "": true} {
		if got := utf8Locale(func(name string) string { return map[string]string{"LANG": locale}[name] }); got != want {
			t.Errorf("locale %q is UTF-8: %t", locale, got)
		}
	}
	if utf8Locale(func(name string) string { return map[string]string{"LANG": "en_US.UTF-8", "LC_ALL": "C"}[name] }) {
		t.Error("LC_ALL does not come first")
	}
}
