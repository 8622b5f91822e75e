# How the images are built: `make image`, `make image-cpu`, and the release. Each variable comes from the environment or from make,
# and make takes TARGET and SOURCE from its command line alone; docs/containers.md says what it means.
variable "IMAGE" { default = "lockstep" }
variable "TAG" { default = "unknown" }
variable "REVISION" { default = "unknown" }
variable "SOURCE" { default = "unknown" }
variable "PLATFORM" { default = "linux/amd64" }
variable "TARGET" { default = "" }
variable "BASE_IMAGE" { default = "" }
variable "WHEELS" { default = "" }
variable "CA" { default = "" }
variable "PIP_CONF" { default = "" }

target "common" {
  dockerfile = "docker/Dockerfile"
  target     = TARGET != "" ? TARGET : "runtime"
  args = {
    BASE_IMAGE   = BASE_IMAGE != "" ? BASE_IMAGE : null
    REVISION     = REVISION
    VERSION      = TAG
    SOURCE       = SOURCE
    PIP_NO_INDEX = WHEELS != "" ? "1" : null
  }
  contexts = WHEELS != "" ? { wheels = WHEELS } : {}
  # Secrets: neither in a layer nor in the history.
  secret = concat(CA != "" ? ["id=ca,src=${CA}"] : [], PIP_CONF != "" ? ["id=pip,src=${PIP_CONF}"] : [])
}

target "cuda" {
  inherits  = ["common"]
  args      = { FLAVOUR = "cuda" }
  tags      = ["${IMAGE}:${TAG}", "${IMAGE}:latest"]
  platforms = [PLATFORM]
}

target "cpu" {
  inherits  = ["common"]
  args      = { FLAVOUR = "cpu" }
  tags      = ["${IMAGE}:${TAG}-cpu", "${IMAGE}:cpu"]
  platforms = ["linux/amd64"] # torch's CPU build is locked for x86-64 alone
}
