package server

import (
	"bytes"
	"encoding/json"
	"hash/maphash"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// beat is an advertisement of which only the sequence and the timestamp are decoded. Most
// advertisements repeat the one before, which costs far less to find out than to decode.
type beat struct {
	Sequence  int64       `json:"sequence"`
	Timestamp metav1.Time `json:"timestamp"`
	// digest is of all the rest of the body.
	digest uint64
}

// beatSeed is of this process.
var beatSeed = maphash.MakeSeed()

// parseBeat returns the beat in a body, or false if the body must be decoded: two bodies
// with the same digest, of which one has been decoded, have the same content but for
// sequence and timestamp.
func parseBeat(body []byte, version string) (beat, bool) {
	var b beat
	var hash maphash.Hash
	hash.SetSeed(beatSeed)
	_, _ = hash.WriteString(version)
	rest, found := 0, [2]bool{}
	complete := members(body, func(key []byte, from, to int) bool {
		var into any
		switch {
		case string(key) == "sequence" && !found[0]:
			found[0], into = true, &b.Sequence
		case string(key) == "timestamp" && !found[1]:
			found[1], into = true, &b.Timestamp
		case bytes.EqualFold(key, []byte("sequence")) || bytes.EqualFold(key, []byte("timestamp")) || bytes.IndexByte(key, '\\') >= 0:
			// The decoder takes it for one of them, or may.
			return false
		default:
			return true
		}
		_ = hash.WriteByte(0)
		_, _ = hash.Write(body[rest:from])
		rest = to
		return json.Unmarshal(body[from:to], into) == nil
	})
	if !complete || !found[0] || !found[1] {
		return b, false
	}
	_ = hash.WriteByte(0)
	_, _ = hash.Write(body[rest:])
	b.digest = hash.Sum64()
	return b, true
}

// members calls each with the key and the position of the value of each member of a JSON
// object, until it returns false. Of what is not JSON, members returns false or anything.
func members(body []byte, each func(key []byte, from, to int) bool) (complete bool) {
	depth, begin := 0, 0
	var key []byte
	for i := 0; i < len(body); i++ {
		switch body[i] {
		case '"':
			end := endOfString(body, i)
			if end < 0 {
				return false
			}
			if depth == 1 && key == nil {
				key, begin = body[i+1:end], -1
			}
			i = end
		case ':':
			if depth == 1 && begin < 0 {
				begin = i + 1
			}
		case '{', '[':
			depth++
		case ',', '}', ']':
			if depth == 1 && key != nil {
				if begin < 0 || !each(key, begin, i) {
					return false
				}
				key = nil
			}
			if body[i] != ',' {
				if depth--; depth == 0 {
					return len(bytes.TrimSpace(body[i+1:])) == 0
				}
			}
		}
	}
	return false
}

// endOfString is the position of the quote that ends the string which begins at a
// position, negative if there is none.
func endOfString(body []byte, at int) int {
	for i := at + 1; i < len(body); i++ {
		switch body[i] {
		case '\\':
			i++
		case '"':
			return i
		}
	}
	return -1
}
