// Package badinput words what is wrong with arguments and flags, and what to write instead.
package badinput
