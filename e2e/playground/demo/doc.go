// Package demo tells what Spillway does, on a playground, to somebody who has
// never heard of it. Each chapter does something and then looks at the real API
// servers until it sees that it came true, or its time is up.
//
//	watch.go     what is to be seen: a Scene, read from every API server
//	chapters.go  what is done, and what must then be seen
//	story.go     from chapter to chapter
//	view.go      how it is shown: a live picture, or plain lines
package demo
