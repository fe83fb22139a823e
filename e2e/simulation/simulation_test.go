package main

import (
	"testing"
	"testing/synctest"
)

func TestOne(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := run(newSchedule(1), plant{}, func(s string) { t.Log(s) })
		t.Logf("%+v %+v", r, r.violation)
	})
}
