// Command workload is what the pods of the scenarios run: it serves its host name
// or sleeps and exits. The other subcommands are for kubectl exec.
package main

import (
	"bufio"
	"crypto/tls"
	"fmt"
	"io"
	"net/http"
	"os"
	"strconv"
	"strings"
	"time"
)

const usage = "usage: workload serve | hostname | get URL [TIMES] | work DURATION | fail CODE | env NAME | print FILE | answer | status URL"

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "workload:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	host, err := os.Hostname()
	if err != nil {
		return err
	}
	switch {
	case len(args) == 1 && args[0] == "serve":
		fmt.Println("serving as", host)
		return http.ListenAndServe(":8080", http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			fmt.Println("served", r.URL.Path)
			fmt.Fprintln(w, host)
		}))
	case len(args) == 1 && args[0] == "hostname":
		fmt.Println(host)
		return nil
	case len(args) >= 2 && len(args) <= 3 && args[0] == "get":
		return get(args[1:])
	case len(args) == 2 && args[0] == "work":
		d, err := time.ParseDuration(args[1])
		if err != nil {
			return err
		}
		fmt.Println("working as", host)
		time.Sleep(d)
		fmt.Println("done as", host)
		return nil
	case len(args) == 2 && args[0] == "fail":
		code, err := strconv.Atoi(args[1])
		if err != nil {
			return err
		}
		fmt.Println("failing with", code)
		os.Exit(code)
	case len(args) == 2 && args[0] == "env":
		fmt.Println(os.Getenv(args[1]))
		return nil
	case len(args) == 2 && args[0] == "print":
		text, err := os.ReadFile(args[1])
		if err != nil {
			return err
		}
		_, err = os.Stdout.Write(text)
		return err
	case len(args) == 2 && args[0] == "status":
		return status(args[1])
	case len(args) == 1 && args[0] == "answer":
		return answer()
	}
	return fmt.Errorf("unknown arguments %q; %s", args, usage)
}

// status prints the status code of an unauthenticated request. The server's
// certificate is not verified.
func status(url string) error {
	client := http.Client{Timeout: 5 * time.Second, Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}}
	answer, err := client.Get(url)
	if err != nil {
		return err
	}
	fmt.Println(answer.StatusCode)
	return answer.Body.Close()
}

// answer responds to each line of standard input, until one is "bye".
func answer() error {
	input := "a pipe"
	if info, err := os.Stdin.Stat(); err == nil && info.Mode()&os.ModeCharDevice != 0 {
		input = "a terminal"
	}
	fmt.Println("talking over", input)
	lines := bufio.NewScanner(os.Stdin)
	for lines.Scan() {
		if lines.Text() == "bye" {
			return nil
		}
		fmt.Println("heard", strings.ToUpper(lines.Text()))
	}
	return lines.Err()
}

// get prints the response of a URL once or several times, each time over a new
// connection, so that a Service can select another endpoint.
func get(args []string) error {
	times := 1
	if len(args) == 2 {
		var err error
		if times, err = strconv.Atoi(args[1]); err != nil {
			return err
		}
	}
	client := http.Client{Timeout: 5 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}
	for range times {
		answer, err := client.Get(args[0])
		if err != nil {
			return err
		}
		_, err = io.Copy(os.Stdout, io.LimitReader(answer.Body, 1<<20))
		answer.Body.Close()
		if err != nil {
			return err
		}
	}
	return nil
}
