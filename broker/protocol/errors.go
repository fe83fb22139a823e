package protocol

import (
	"errors"
	"net/http"
)

// Codes of Error.
const (
	// CodeInvalid is a request that can never succeed as it is written.
	CodeInvalid = "Invalid"
	// CodeUnauthorized is a caller without a certificate that the broker knows.
	CodeUnauthorized = "Unauthorized"
	// CodeForbidden is a known caller that speaks for another cluster.
	CodeForbidden = "Forbidden"
	// CodeNotFound is a thing that is not there, or not the caller's to see.
	CodeNotFound = "NotFound"
	// CodeConflict is a thing that is in another state than the caller assumes.
	CodeConflict = "Conflict"
	// CodeTooLarge is a body over its bound.
	CodeTooLarge = "TooLarge"
	// CodeTooMany is a caller over its rate, or a mailbox that is full.
	CodeTooMany = "TooMany"
	// CodeUnavailable is a broker that does not lead, or cannot reach its API
	// server. The same request may succeed later.
	CodeUnavailable = "Unavailable"
	// CodeInternal is the broker's own fault.
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
	CodeInternal:     http.StatusInternalServerError,
}

// Status is the HTTP status that goes with the error's code.
func (e *Error) Status() int {
	if status, known := statuses[e.Code]; known {
		return status
	}
	return http.StatusInternalServerError
}

// HasCode reports whether err is, or wraps, the broker's answer with this code.
func HasCode(err error, code string) bool {
	var answer *Error
	return errors.As(err, &answer) && answer.Code == code
}
