package charts_test

import (
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
)

// TestHistory checks where the broker's history is kept.
func TestHistory(t *testing.T) {
	const sqlite, postgres = "--history-path=/var/lib/spillway/history.db", "--history-postgres-url-file=/etc/spillway/history/url"
	for name, c := range map[string]struct {
		values  []string
		flag    string
		claims  int
		volumes int
	}{
		"by default":                   {nil, sqlite, 1, 1},
		"without a volume that stays":  {[]string{"history.persistence.enabled=false"}, sqlite, 0, 1},
		"off":                          {[]string{"history.enabled=false"}, "", 0, 0},
		"two replicas":                 {[]string{"replicas=2"}, "", 0, 0},
		"two replicas and PostgreSQL":  {[]string{"replicas=2", "history.postgres.existingSecret=db"}, postgres, 0, 1},
		"off in spite of a PostgreSQL": {[]string{"history.enabled=false", "history.postgres.existingSecret=db"}, "", 0, 0},
	} {
		t.Run(name, func(t *testing.T) {
			objects := render(t, "broker", c.values)
			broker := only[appsv1.Deployment](t, objects, "Deployment")[0].Spec.Template.Spec
			flags := slices.DeleteFunc(slices.Clone(broker.Containers[0].Args), func(arg string) bool {
				return !strings.HasPrefix(arg, "--history-path") && !strings.HasPrefix(arg, "--history-postgres")
			})
			if got := strings.Join(flags, " "); got != c.flag {
				t.Errorf("the flag is %q, want %q", got, c.flag)
			}
			if claims := only[corev1.PersistentVolumeClaim](t, objects, "PersistentVolumeClaim"); len(claims) != c.claims {
				t.Errorf("%d PersistentVolumeClaims, want %d", len(claims), c.claims)
			}
			if len(broker.Volumes) != c.volumes || len(broker.Containers[0].VolumeMounts) != c.volumes {
				t.Errorf("%d volumes, %d mounts, want %d", len(broker.Volumes), len(broker.Containers[0].VolumeMounts), c.volumes)
			}
		})
	}
}
