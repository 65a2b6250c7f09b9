//go:build tools

package e2e

// The program in most of the suite's pods.
import _ "k8s.io/kubernetes/test/images/agnhost"
