package badinput

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// Explain lets commands say what to write instead of arguments and flags that they do not take.
func Explain(root *cobra.Command) {
	root.SuggestionsMinimumDistance = 2
	root.Args = unknownVerb
	root.SetFlagErrorFunc(badFlag)
	for _, c := range root.Commands() {
		takes := c.Args
		c.Args = func(c *cobra.Command, arguments []string) error {
			if takes(c, arguments) == nil {
				return nil
			}
			given := fmt.Sprintf("%d arguments are given", len(arguments))
			if len(arguments) == 1 {
				given = "1 argument is given"
			}
			return fmt.Errorf("%s: write %s, or see its --help", given, strings.TrimSuffix(c.UseLine(), " [flags]"))
		}
	}
}

// unknownVerb refuses arguments that name no verb.
func unknownVerb(root *cobra.Command, arguments []string) error {
	if len(arguments) == 0 {
		return nil
	}
	did := ""
	if alike := root.SuggestionsFor(arguments[0]); len(alike) > 0 {
		did = fmt.Sprintf(" did you mean %s?", strings.Join(alike, " or "))
	}
	return fmt.Errorf("unknown command %q;%s see %s --help", arguments[0], did, root.CommandPath())
}

// kinds of values of flags, by pflag's names.
var kinds = map[string]string{"int32": "a whole number", "duration": "a duration, such as 5m or 24h", "bool": "true or false"}

// badFlag words the error of a flag.
func badFlag(c *cobra.Command, err error) error {
	var value *pflag.InvalidValueError
	if errors.As(err, &value) && kinds[value.GetFlag().Value.Type()] != "" {
		return fmt.Errorf("--%s=%q is not %s", value.GetFlag().Name, value.GetValue(), kinds[value.GetFlag().Value.Type()])
	}
	return fmt.Errorf("%w; see %s --help", err, c.CommandPath())
}

// Durations refuses a duration that is not above 0: a wait that is over at once is a mistake.
func Durations(flags *pflag.FlagSet) (err error) {
	flags.Visit(func(f *pflag.Flag) {
		if parsed, _ := time.ParseDuration(f.Value.String()); f.Value.Type() == "duration" && parsed <= 0 {
			err = fmt.Errorf("--%s=%s must be above 0, such as 5m", f.Name, f.Value)
		}
	})
	return err
}
