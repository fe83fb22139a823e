// Command metrics-server is metrics-server's own server behind the flags that
// its chart sets. Its original main does not compile with this module's version
// of Kubernetes.
package main

import (
	"fmt"
	"net"
	"os"
	"time"

	"github.com/spf13/pflag"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apiserver/pkg/endpoints/openapi"
	genericapiserver "k8s.io/apiserver/pkg/server"
	"k8s.io/apiserver/pkg/server/options"
	"k8s.io/apiserver/pkg/util/compatibility"
	"k8s.io/client-go/tools/clientcmd"
	definitions "k8s.io/kubernetes/pkg/generated/openapi"

	"sigs.k8s.io/metrics-server/pkg/api"
	"sigs.k8s.io/metrics-server/pkg/scraper/client"
	"sigs.k8s.io/metrics-server/pkg/server"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "metrics-server:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	flags := pflag.NewFlagSet("metrics-server", pflag.ContinueOnError)
	serving := options.NewSecureServingOptions().WithLoopback()
	authentication := options.NewDelegatingAuthenticationOptions()
	authorization := options.NewDelegatingAuthorizationOptions()
	serving.AddFlags(flags)
	authentication.AddFlags(flags)
	authorization.AddFlags(flags)
	kubeconfig := flags.String("kubeconfig", "", "Path to a kubeconfig. The Pod's ServiceAccount is used if empty.")
	resolution := flags.Duration("metric-resolution", time.Minute, "Interval between scrapes of a kubelet.")
	addressTypes := flags.StringSlice("kubelet-preferred-address-types", []string{"InternalIP"}, "Node address types, in order of preference.")
	statusPort := flags.Bool("kubelet-use-node-status-port", false, "Use the kubelet's port from the Node's status.")
	insecure := flags.Bool("kubelet-insecure-tls", false, "Do not verify the kubelets' certificates.")
	if err := flags.Parse(args); err != nil {
		return err
	}

	config := genericapiserver.NewConfig(api.Codecs)
	config.EffectiveVersion = compatibility.DefaultBuildEffectiveVersion()
	namer := openapi.NewDefinitionNamer(api.Scheme)
	config.OpenAPIConfig = genericapiserver.DefaultOpenAPIConfig(definitions.GetOpenAPIDefinitions, namer)
	config.OpenAPIV3Config = genericapiserver.DefaultOpenAPIV3Config(definitions.GetOpenAPIDefinitions, namer)
	if err := serving.MaybeDefaultWithSelfSignedCerts("localhost", nil, []net.IP{net.IPv4(127, 0, 0, 1)}); err != nil {
		return err
	}
	if err := serving.ApplyTo(&config.SecureServing, &config.LoopbackClientConfig); err != nil {
		return err
	}
	if err := authentication.ApplyTo(&config.Authentication, config.SecureServing, nil); err != nil {
		return err
	}
	if err := authorization.ApplyTo(&config.Authorization); err != nil {
		return err
	}

	rest, err := clientcmd.BuildConfigFromFlags("", *kubeconfig)
	if err != nil {
		return err
	}
	rest.ContentType = "application/vnd.kubernetes.protobuf"
	kubelet := client.KubeletClientConfig{Client: *rest, Scheme: "https", DefaultPort: 10250, UseNodeStatusPort: *statusPort}
	for _, t := range *addressTypes {
		kubelet.AddressTypePriority = append(kubelet.AddressTypePriority, corev1.NodeAddressType(t))
	}
	if *insecure {
		kubelet.Client.TLSClientConfig.Insecure = true
		kubelet.Client.TLSClientConfig.CAData = nil
		kubelet.Client.TLSClientConfig.CAFile = ""
	}
	s, err := server.Config{
		Apiserver: config, Rest: rest, Kubelet: &kubelet, MetricResolution: *resolution, ScrapeTimeout: 10 * time.Second,
	}.Complete()
	if err != nil {
		return err
	}
	return s.RunUntil(genericapiserver.SetupSignalHandler())
}
