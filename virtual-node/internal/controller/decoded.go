package controller

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"reflect"
	"regexp"
	"strconv"
	"strings"
	"sync"

	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes/scheme"
	metricsscheme "k8s.io/metrics/pkg/client/clientset/versioned/scheme"
)

// Bounds on the memory that what a provider sends takes once it is decoded. An element that is
// empty has two bytes in protobuf, and several hundred in memory.
const (
	// maxDecoded is that of one answer that is not a stream.
	maxDecoded = 256 << 20
	// maxDecodedEvent is that of one event of a watch, and maxEvent its size as it is sent.
	maxDecodedEvent = 64 << 20
	maxEvent        = 16 << 20
)

// decodable refuses answers of a provider that would take too much memory once they are decoded.
// The sizes as they are sent are bounded by next.
type decodable struct{ next http.RoundTripper }

func (d decodable) RoundTrip(request *http.Request) (*http.Response, error) {
	response, err := d.next.RoundTrip(request)
	if err != nil || response.Body == nil || response.StatusCode == http.StatusSwitchingProtocols {
		return response, err
	}
	path, limit := request.URL.Path, limitOf(request)
	failed := response.StatusCode >= http.StatusBadRequest
	if limit == 0 && !failed {
		return response, nil // a stream, which is not decoded
	}
	kind, _, err := mime.ParseMediaType(response.Header.Get("Content-Type"))
	switch {
	case limit == maxWatch && !failed:
		if err != nil || kind != runtime.ContentTypeProtobuf {
			response.Body.Close()
			return nil, fmt.Errorf("the provider's watch of %s is not encoded in protobuf", path)
		}
		response.Body = &checkedEvents{ReadCloser: response.Body, path: path}
	case kind == runtime.ContentTypeYAML || kind == runtime.ContentTypeCBOR:
		response.Body.Close()
		return nil, fmt.Errorf("the provider's answer to %s is encoded in %s, which was not asked for", path, kind)
	case kind == runtime.ContentTypeJSON:
		response.Body = &checkedBody{ReadCloser: response.Body, path: path, check: (*memory).json}
	default:
		response.Body = &checkedBody{ReadCloser: response.Body, path: path, check: (*memory).object}
	}
	return response, nil
}

// checkedBody is read as a whole, and checked, before any of it is returned.
type checkedBody struct {
	io.ReadCloser
	path    string
	check   func(left *memory, data []byte) error
	checked *bytes.Reader
}

func (b *checkedBody) Read(p []byte) (int, error) {
	if b.checked == nil {
		data, err := io.ReadAll(b.ReadCloser)
		if err != nil {
			return 0, err
		}
		left := memory(maxDecoded)
		if err := b.check(&left, data); err != nil {
			return 0, fmt.Errorf("the provider's answer to %s: %w", b.path, err)
		}
		b.checked = bytes.NewReader(data)
	}
	return b.checked.Read(p)
}

// checkedEvents returns the events of a watch one by one, each with its length before it.
type checkedEvents struct {
	io.ReadCloser
	path  string
	event bytes.Buffer
}

func (e *checkedEvents) Read(p []byte) (int, error) {
	if e.event.Len() == 0 {
		if err := e.next(); err != nil {
			return 0, err
		}
	}
	return e.event.Read(p)
}

func (e *checkedEvents) next() error {
	var length [4]byte
	if _, err := io.ReadFull(e.ReadCloser, length[:]); err != nil {
		return err
	}
	size := int64(binary.BigEndian.Uint32(length[:]))
	if size > maxEvent {
		return fmt.Errorf("an event of the provider's watch of %s has %d bytes, more than %d", e.path, size, maxEvent)
	}
	e.event.Reset()
	e.event.Write(length[:])
	if n, err := io.CopyN(&e.event, e.ReadCloser, size); err != nil {
		e.event.Reset()
		if errors.Is(err, io.EOF) && n < size {
			return io.ErrUnexpectedEOF
		}
		return err
	}
	left := memory(maxDecodedEvent)
	if err := left.message(reflect.TypeFor[metav1.WatchEvent](), e.event.Bytes()[len(length):]); err != nil {
		e.event.Reset()
		return fmt.Errorf("an event of the provider's watch of %s: %w", e.path, err)
	}
	return nil
}

// memory is what may still be taken by what is decoded.
type memory int64

var (
	errTooLarge  = errors.New("it takes too much memory once it is decoded")
	errMalformed = errors.New("it is malformed")
)

func (m *memory) take(n int) error {
	if *m -= memory(n); *m < 0 {
		return errTooLarge
	}
	return nil
}

// json counts what in JSON can be decoded as an element of a list: objects, null for an empty
// one, and whatever stands in a list. What is of another type than the element is an error, but
// only once everything is decoded.
func (m *memory) json(data []byte) error {
	const largest, entry = 4096, 256
	quoted := false
	text := 0       // where the text or number begins
	var open []byte // the brackets that are
	for i := 0; i < len(data); i++ {
		c, n := data[i], 0
		switch {
		case quoted && c == '\\':
			i++
			continue
		case quoted && c != '"':
			continue
		}
		if strings.IndexByte("\"{}[],:", c) < 0 {
			if c == 'n' {
				n = largest
			}
			if err := m.take(n); err != nil {
				return err
			}
			continue
		}
		if err := checkQuantity(data[text:i]); err != nil {
			return err
		}
		text = i + 1
		switch c {
		case '"':
			quoted = !quoted
		case '{':
			open, n = append(open, c), largest
		case '[':
			if open = append(open, c); !counts(data[i+1:]) {
				n = largest
			}
		case '}', ']':
			open = open[:max(0, len(open)-1)]
		case ',':
			if n = entry; len(open) > 0 && open[len(open)-1] == '[' && !counts(data[i+1:]) {
				n = largest
			}
		}
		if err := m.take(n); err != nil {
			return err
		}
	}
	return nil
}

// counts reports whether json counts what begins there, or a list ends.
func counts(data []byte) bool {
	for _, c := range data {
		if strings.IndexByte(" \t\r\n", c) < 0 {
			return strings.IndexByte("{n]", c) >= 0
		}
	}
	return true
}

// maxExponent is far beyond that of any quantity, and takes little memory and time. maxDigits
// is that too.
const maxExponent, maxDigits = 1000, 1000

var quantity = regexp.MustCompile(`^[+-]?([0-9]*\.?[0-9]*)(?:[eE]([+-]?[0-9]+))?$`)

// checkQuantity refuses a text that takes memory and time without end if it is parsed as a
// quantity: 1e-2000000000 is divided by a number of so many digits.
func checkQuantity(text []byte) error {
	text = bytes.TrimSpace(text)
	if len(text) == 0 || strings.IndexByte("+-.0123456789", text[0]) < 0 {
		return nil
	}
	parts := quantity.FindSubmatch(text)
	if parts == nil {
		return nil
	}
	if len(parts[1]) > maxDigits {
		return errTooLarge
	}
	// As it is parsed: one of 64 bits is cut to 32.
	exponent, err := strconv.ParseInt(string(parts[2]), 10, 64)
	if e := int32(exponent); err == nil && (e < -maxExponent || e > maxExponent && len(parts[1]) > 18) {
		return errTooLarge
	}
	return nil
}

// object counts an object in Kubernetes' envelope. What is not one is not decoded.
func (m *memory) object(data []byte) error {
	data, ok := bytes.CutPrefix(data, []byte("k8s\x00"))
	if !ok {
		return nil
	}
	var raw []byte
	var meta runtime.TypeMeta
	err := fields(data, func(number int, value []byte) error {
		switch number {
		case 1:
			return fields(value, func(number int, text []byte) error {
				switch number {
				case 1:
					meta.APIVersion = string(text)
				case 2:
					meta.Kind = string(text)
				}
				return nil
			})
		case 2:
			raw = value
		}
		return nil
	})
	if err != nil {
		return err
	}
	kind := schema.FromAPIVersionAndKind(meta.APIVersion, meta.Kind)
	for _, s := range []*runtime.Scheme{scheme.Scheme, metricsscheme.Scheme} {
		if t, known := s.AllKnownTypes()[kind]; known {
			if err := m.take(int(t.Size())); err != nil {
				return err
			}
			return m.message(t, raw)
		}
	}
	return fmt.Errorf("it is of an unknown kind %q", meta.Kind)
}

// message counts what the fields of a message take beside the struct itself.
func (m *memory) message(t reflect.Type, data []byte) error {
	known := fieldsOf(t)
	return fields(data, func(number int, value []byte) error {
		if field, ok := known[number]; ok {
			return m.value(field, value)
		}
		return nil
	})
}

// value counts a value of a field; one that repeats is counted each time.
func (m *memory) value(t reflect.Type, value []byte) error {
	switch t.Kind() {
	case reflect.Pointer:
		if err := m.take(int(t.Elem().Size())); err != nil {
			return err
		}
		return m.value(t.Elem(), value)
	case reflect.Struct:
		if t == reflect.TypeFor[runtime.RawExtension]() {
			return m.rawExtension(value)
		}
		if t == reflect.TypeFor[resource.Quantity]() {
			return fields(value, func(_ int, text []byte) error { return checkQuantity(text) })
		}
		return m.message(t, value)
	case reflect.Slice:
		if t.Elem().Kind() == reflect.Uint8 {
			return m.take(len(value))
		}
		if t.Name() != "" {
			return m.take(32 * len(value)) // a message with a list of texts
		}
		// While a slice grows, it is there twice. Numbers may be packed.
		n := 1
		if isNumber(t.Elem()) {
			n = max(1, len(value))
		}
		if err := m.take(2 * n * int(t.Elem().Size())); err != nil {
			return err
		}
		return m.value(t.Elem(), value)
	case reflect.Map:
		if err := m.take(256 + 2*len(value)); err != nil {
			return err
		}
		elem := t.Elem()
		return fields(value, func(number int, value []byte) error {
			if number != 2 {
				return nil // the key is counted
			}
			return m.value(elem, value)
		})
	default:
		return m.take(len(value))
	}
}

func isNumber(t reflect.Type) bool {
	return t.Kind() != reflect.String && t.Kind() != reflect.Struct && t.Kind() != reflect.Slice
}

// rawExtension counts the object in an event or a list of objects of any kind.
func (m *memory) rawExtension(data []byte) error {
	return fields(data, func(number int, value []byte) error {
		if number != 1 {
			return nil
		}
		if err := m.take(len(value)); err != nil {
			return err
		}
		return m.object(value)
	})
}

// fieldTypes are the types of the fields of each message, by number.
var fieldTypes sync.Map

func fieldsOf(t reflect.Type) map[int]reflect.Type {
	if known, ok := fieldTypes.Load(t); ok {
		return known.(map[int]reflect.Type)
	}
	out := map[int]reflect.Type{}
	for i := range t.NumField() {
		if tag := strings.Split(t.Field(i).Tag.Get("protobuf"), ","); len(tag) > 1 {
			if number, err := strconv.Atoi(tag[1]); err == nil {
				out[number] = t.Field(i).Type
			}
		}
	}
	fieldTypes.Store(t, out)
	return out
}

// fields calls each for the fields of a message in protobuf, with their bytes if they have a length.
func fields(data []byte, each func(number int, value []byte) error) error {
	for len(data) > 0 {
		tag, size := binary.Uvarint(data)
		if size <= 0 {
			return errMalformed
		}
		data = data[size:]
		var value []byte
		switch tag & 7 {
		case 0:
			if _, size = binary.Uvarint(data); size <= 0 {
				return errMalformed
			}
		case 1:
			size = 8
		case 2:
			length, prefix := binary.Uvarint(data)
			if prefix <= 0 || length > uint64(len(data)-prefix) {
				return errMalformed
			}
			size = prefix + int(length)
			value = data[prefix:size]
		case 5:
			size = 4
		default:
			return errMalformed
		}
		if size > len(data) {
			return errMalformed
		}
		if err := each(int(tag>>3), value); err != nil {
			return err
		}
		data = data[size:]
	}
	return nil
}
