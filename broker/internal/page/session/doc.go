// Package session has who is signed in at the broker's page, and what each of them may see. Who signs
// in shows a token of the hub; the API server says whose it is, and what that user may list, when
// they sign in and at most a minute before each answer. A browser has the random name of its session
// only, never the token.
package session
