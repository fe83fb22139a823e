// Package condition keeps the condition of pods that says what they wait for, and where they were
// bound. What a pod says already is not written again: a condition of the same meaning, which is what
// it says but for the figures, only once an hour. The memory of that is the pod itself.
package condition
