package protocol

import (
	"errors"
	"fmt"
	"net/http"
)

// Codes of Error.
const (
	// CodeInvalid: the request cannot succeed unless it is changed.
	CodeInvalid = "Invalid"
	// CodeUnauthorized: the caller has no certificate or token that the broker accepts.
	CodeUnauthorized = "Unauthorized"
	// CodeForbidden: the caller acts for another cluster.
	CodeForbidden = "Forbidden"
	// CodeNotFound: the object does not exist, or belongs to another cluster.
	CodeNotFound = "NotFound"
	// CodeConflict: the request contradicts the current state of the object.
	CodeConflict = "Conflict"
	// CodeTooLarge: the body exceeds its maximum size.
	CodeTooLarge = "TooLarge"
	// CodeTooMany: the caller exceeds its rate, or the receiver's mailbox is full.
	CodeTooMany = "TooMany"
	// CodeUnavailable: the replica is not the leader, or cannot reach its API server.
	// The same request may succeed later.
	CodeUnavailable = "Unavailable"
	// CodeUnsupported: the two sides have no version of the protocol in common.
	CodeUnsupported = "Unsupported"
	// CodeInternal: the broker failed.
	CodeInternal = "Internal"
)

var statuses = map[string]int{
	CodeInvalid:      http.StatusBadRequest,
	CodeUnauthorized: http.StatusUnauthorized,
	CodeForbidden:    http.StatusForbidden,
	CodeNotFound:     http.StatusNotFound,
	CodeConflict:     http.StatusConflict,
	CodeTooLarge:     http.StatusRequestEntityTooLarge,
	CodeTooMany:      http.StatusTooManyRequests,
	CodeUnavailable:  http.StatusServiceUnavailable,
	CodeUnsupported:  http.StatusBadRequest,
	CodeInternal:     http.StatusInternalServerError,
}

// Status is the HTTP status of the error's code.
func (e *Error) Status() int {
	if status, known := statuses[e.Code]; known {
		return status
	}
	return http.StatusInternalServerError
}

// HasCode reports whether err is or wraps an *Error with the code.
func HasCode(err error, code string) bool {
	var refusal *Error
	return errors.As(err, &refusal) && refusal.Code == code
}

// OutdatedError means that the broker has a later advertisement of the cluster than the
// one that was sent, which it ignored.
type OutdatedError struct {
	// Latest is the sequence of the later one. The next measurement needs a higher one.
	Latest int64
}

func (e *OutdatedError) Error() string {
	return fmt.Sprintf("the broker has a later advertisement, with sequence %d", e.Latest)
}
