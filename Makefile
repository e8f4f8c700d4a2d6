# SPDX-License-Identifier: Apache-2.0
# leat: an inference daemon for machines with a small GPU.  `make help` lists the targets.

VERSION       := 0.1.0
BUILD         ?= build
PREFIX        ?= /usr
SYSCONFDIR    ?= /etc
LOCALSTATEDIR ?= /var
DESTDIR       ?=
SANITIZE      ?=
DEVELOPER     ?= 1
V             ?= 0

CC         ?= cc
PKG_CONFIG ?= pkg-config

# Builds with another compiler, sanitizer or flags go to a folder of their own, so that objects never mix.
comma := ,
ifneq ($(SANITIZE),)
override BUILD := $(BUILD)/sanitize-$(subst $(comma),-,$(SANITIZE))
endif

SCRIPTS  := packaging/scripts
PACKAGES := OpenCL yaml-0.1 libsystemd libpcre2-8 jansson libcrypto libxxhash

STD  := -std=gnu11 -D_GNU_SOURCE -DCL_TARGET_OPENCL_VERSION=120 -DLEAT_VERSION='"$(VERSION)"' \
        -DLEAT_SYSCONFDIR='"$(SYSCONFDIR)"' -DLEAT_PREFIX='"$(PREFIX)"' -DLEAT_LOCALSTATEDIR='"$(LOCALSTATEDIR)"'
WARN := -Wall -Wextra -Wshadow -Wstrict-prototypes -Wmissing-prototypes -Wpointer-arith -Wcast-qual -Wundef \
        -Wwrite-strings -Wvla -Wformat=2 -Wnull-dereference -Wimplicit-fallthrough
ifeq ($(DEVELOPER),1)
WARN += -Werror
endif
OPT  := -O2 -g -fno-strict-aliasing -ffp-contract=off
SAN  := $(if $(SANITIZE),-fsanitize=$(SANITIZE) -fno-sanitize-recover=all -fno-omit-frame-pointer)

ALL_CFLAGS  = $(STD) $(WARN) $(OPT) $(SAN) -I. $(shell $(PKG_CONFIG) --cflags $(PACKAGES)) $(CFLAGS)
ALL_LDFLAGS = $(SAN) $(LDFLAGS)
LIBS        = $(shell $(PKG_CONFIG) --libs $(PACKAGES)) -lclblast -lm -lpthread

ifeq ($(V),0)
Q := @
say = @printf '  %-7s %s\n' $(1) $(2)
else
Q :=
say = @:
endif

# ---- sources, by layer --------------------------------------------------------------------------------------------------

QUANT_SRC  := $(sort $(wildcard quant/base/*.c quant/*.c))
OPENCL_SRC := $(sort $(wildcard opencl/*.c))
KERNELS    := $(sort $(wildcard opencl/kernels/*.cl))
CACHE_SRC  := $(sort $(wildcard cache/*.c))
TEXT_SRC   := $(sort $(wildcard daemon/text/*.c))
MODEL_SRC  := $(sort $(wildcard daemon/model/*.c))
ENGINE_SRC := $(sort $(wildcard daemon/engine/*.c))
CONFIG_SRC := $(sort $(wildcard daemon/config/*.c))
BUS_SRC    := $(sort $(wildcard daemon/bus/*.c))
CTL_SRC    := $(sort $(wildcard daemon/ctl/*.c))
LIB_SRC    := $(QUANT_SRC) $(OPENCL_SRC) $(CACHE_SRC) $(TEXT_SRC) $(MODEL_SRC) $(ENGINE_SRC) $(CONFIG_SRC)

UNIT_TESTS   := $(patsubst tests/%.c,$(BUILD)/tests/%,$(sort $(wildcard tests/unit/test-*.c)))
PARITY_TESTS := $(patsubst tests/%.c,$(BUILD)/tests/%,$(sort $(wildcard tests/parity/test-*.c)))
FAULT_TESTS  := $(patsubst tests/%.c,$(BUILD)/tests/%,$(sort $(wildcard tests/faults/test-*.c)))
BUS_TESTS    := $(patsubst tests/%.c,$(BUILD)/tests/%,$(sort $(wildcard tests/bus/test-*.c)))
BENCHES      := $(patsubst tests/%.c,$(BUILD)/tests/%,$(sort $(wildcard tests/bench/bench-*.c)))

lib_objects  := $(LIB_SRC:%.c=$(BUILD)/%.o) $(BUILD)/opencl/kernels.o
bus_objects  := $(BUS_SRC:%.c=$(BUILD)/%.o)
ctl_objects  := $(CTL_SRC:%.c=$(BUILD)/%.o)

.PHONY: all
all: programs

.PHONY: programs
programs: $(BUILD)/leatd $(BUILD)/leat

$(BUILD)/leatd: $(BUILD)/daemon/main.o $(bus_objects) $(BUILD)/libleat.a
	$(call say,LINK,$@)
	$(Q)$(CC) $(ALL_LDFLAGS) -o $@ $^ $(LIBS)

$(BUILD)/leat: $(ctl_objects) $(BUILD)/libleat.a
	$(call say,LINK,$@)
	$(Q)$(CC) $(ALL_LDFLAGS) -o $@ $^ $(LIBS)

$(BUILD)/libleat.a: $(lib_objects)
	$(call say,AR,$@)
	$(Q)rm -f $@ && ar rcs $@ $^

$(BUILD)/%.o: %.c $(BUILD)/flags
	$(call say,CC,$<)
	@mkdir -p $(@D)
	$(Q)$(CC) $(ALL_CFLAGS) -MMD -MP -c -o $@ $<

# Kernels become bytes of the library; the table names them (opencl/kernels.h).
$(BUILD)/opencl/kernels.S: $(KERNELS) Makefile
	@mkdir -p $(@D)
	$(Q){ printf '.section .rodata\n'; i=0; \
	  for k in $(KERNELS); do \
	    printf 'kn%d: .asciz "%s"\nks%d: .incbin "%s"\nke%d: .byte 0\n' $$i $$(basename $$k) $$i $$k $$i; i=$$((i+1)); done; \
	  printf '.section .data.rel.ro,"aw"\n.balign 8\n.globl leat_kernel_sources\nleat_kernel_sources:\n'; i=0; \
	  for k in $(KERNELS); do printf '.quad kn%d, ks%d, ke%d - ks%d\n' $$i $$i $$i $$i; i=$$((i+1)); done; \
	  printf '.quad 0, 0, 0\n.section .note.GNU-stack,"",%%progbits\n'; } > $@

$(BUILD)/opencl/kernels.o: $(BUILD)/opencl/kernels.S
	$(call say,EMBED,$@)
	$(Q)$(CC) -c -o $@ $<

# Rebuild everything when the flags change.
$(BUILD)/flags: FORCE
	@mkdir -p $(@D)
	@printf '%s\n' '$(CC) $(subst ','"'"',$(ALL_CFLAGS) $(ALL_LDFLAGS))' > $@.new; cmp -s $@ $@.new && rm $@.new || mv $@.new $@
.PHONY: FORCE
FORCE:

# ---- tests ------------------------------------------------------------------------------------------------------------------

test_objects  := $(patsubst %.c,$(BUILD)/%.o,$(sort $(wildcard tests/lib/*.c)))
filter_object := $(BUILD)/tests/lib/filter.o

# An archive, so that a program links only what it uses.
$(BUILD)/tests/libtests.a: $(test_objects)
	$(call say,AR,$@)
	$(Q)rm -f $@ && ar rcs $@ $^

$(BUILD)/tests/%: $(BUILD)/tests/%.o $(filter_object) $(BUILD)/tests/libtests.a $(BUILD)/libleat.a
	$(call say,LINK,$@)
	$(Q)$(CC) $(ALL_LDFLAGS) -o $@ $^ -lcmocka $(LIBS)

# The engine on what tests/fakes plays of the layers below it; linked first, so that the library's own are not.
FAKE_TESTS   := $(addprefix $(BUILD)/tests/unit/test-engine-,batch files jobs models prefixes sessions)
fake_objects := $(patsubst %.c,$(BUILD)/%.o,$(sort $(wildcard tests/fakes/*.c)))

$(FAKE_TESTS): $(BUILD)/tests/%: $(BUILD)/tests/%.o $(filter_object) $(fake_objects) $(BUILD)/tests/libtests.a $(BUILD)/libleat.a
	$(call say,LINK,$@)
	$(Q)$(CC) $(ALL_LDFLAGS) -o $@ $^ -lcmocka $(LIBS)

# Bus tests: a harness, cases, and an engine that needs no device; the daemons that they start.
bus_test_objects := $(patsubst %.c,$(BUILD)/%.o,$(filter-out tests/bus/test-%,$(sort $(wildcard tests/bus/*.c))))

$(BUS_TESTS): $(BUILD)/tests/bus/test-%: $(BUILD)/tests/bus/test-%.o $(filter_object) $(bus_test_objects) $(bus_objects) $(BUILD)/tests/libtests.a $(BUILD)/libleat.a
	$(call say,LINK,$@)
	$(Q)$(CC) $(ALL_LDFLAGS) -o $@ $^ -lcmocka $(LIBS)

$(BUILD)/tests/bus/leatd-fake: $(BUILD)/daemon/main.o $(BUILD)/tests/bus/fake-engine.o $(bus_objects) $(BUILD)/libleat.a
	$(call say,LINK,$@)
	$(Q)$(CC) $(ALL_LDFLAGS) -o $@ $^ $(LIBS)

$(BUILD)/tests/bus/test-bus-protocol $(BUILD)/tests/bus/test-bus-policy $(BUILD)/tests/bus/test-bus-refusals $(BUILD)/tests/bus/test-bus-texts: | $(BUILD)/tests/bus/leatd-fake
$(BUILD)/tests/bus/test-bus-daemon $(BUILD)/tests/bus/test-bus-soak: | $(BUILD)/leatd

.PHONY: tests
tests: $(UNIT_TESTS) $(PARITY_TESTS) $(FAULT_TESTS) $(BUS_TESTS) sim

# The simulated small GPU (tests/sim/README.md): a layer for the OpenCL loader, of no use to the programs themselves.
SIM         := $(BUILD)/tests/sim/libclsim.so
AWAKE       := $(BUILD)/tests/sim/libawake.so
awake_object := $(BUILD)/tests/sim/awake.o
sim_objects := $(filter-out $(awake_object),$(patsubst %.c,$(BUILD)/%.o,$(sort $(wildcard tests/sim/*.c))))
$(sim_objects) $(awake_object): private OPT += -fPIC -fvisibility=hidden

$(SIM): $(sim_objects)
	$(call say,LINK,$@)
	$(Q)$(CC) $(ALL_LDFLAGS) -shared -Wl,-soname,libclsim.so -o $@ $^ -ldl -lm -lpthread

$(AWAKE): $(awake_object)
	$(call say,LINK,$@)
	$(Q)$(CC) $(ALL_LDFLAGS) -shared -Wl,-soname,libawake.so -o $@ $^ -ldl -lpthread

.PHONY: sim
sim: $(SIM) $(AWAKE)

$(filter $(BUILD)/tests/parity/test-sim-%,$(PARITY_TESTS)) $(FAULT_TESTS): | $(SIM) $(AWAKE)

# Fault tests: what leat's own objects call of OpenCL, and what gives them memory, passes through tests/lib/fault-*.c.
FAULT_CALLS := clGetPlatformIDs clGetPlatformInfo clGetDeviceIDs clGetDeviceInfo clCreateContext clReleaseContext \
               clCreateCommandQueue clReleaseCommandQueue clCreateBuffer clReleaseMemObject \
               clSetMemObjectDestructorCallback clCreateProgramWithSource clCreateProgramWithBinary clReleaseProgram \
               clBuildProgram clGetProgramInfo clGetProgramBuildInfo clCreateKernel clReleaseKernel clSetKernelArg \
               clGetKernelWorkGroupInfo clEnqueueNDRangeKernel clEnqueueWriteBuffer clEnqueueReadBuffer \
               clEnqueueCopyBuffer clEnqueueFillBuffer clEnqueueMigrateMemObjects clEnqueueBarrierWithWaitList clFlush \
               clFinish clWaitForEvents clGetEventInfo clSetEventCallback clReleaseEvent clGetEventProfilingInfo
FAULT_MEMORY := fopen fdopen open_memstream getdelim memfd_create eventfd pthread_create EVP_MD_CTX_new XXH3_createState \
                json_object json_array json_string json_integer json_real json_dumps malloc calloc realloc reallocarray \
                free strdup strndup asprintf vasprintf mmap munmap mremap
$(FAULT_TESTS): private LDFLAGS += $(foreach f,$(FAULT_CALLS) $(FAULT_MEMORY),-Wl,--wrap=$f)

# make test T=kv-codec F='*odd*' runs one program, one pattern, in the surroundings of make check; no match is a failure.
.PHONY: test
test: $(patsubst %.c,$(BUILD)/%,$(firstword $(wildcard tests/*/test-$(T).c) no-test-$(T)))
	$(Q)here=$(CURDIR) build=$(abspath $(BUILD)); . tests/environment; \
	  export LEAT_TEST_MODEL="$${LEAT_TEST_MODEL:-$$($(SCRIPTS)/fetch-model)}"; \
	  { $(if $(F),CMOCKA_TEST_FILTER='$(F)') $< 2>&1; echo $$? > $<.status; } | tee $<.log; \
	  if grep -q '^\[==========\] 0 test' $<.log; then echo "no test matches '$(F)'" >&2; exit 1; fi; exit $$(cat $<.status)

# ---- what a person calls --------------------------------------------------------------------------------------------------------

.PHONY: packages
packages:
	$(Q)$(SCRIPTS)/install-packages

# Everything from nothing: packages, build, model, a private bus with the daemon, one answer, one table.
.PHONY: demo
demo: packages
	$(Q)$(MAKE) --no-print-directory programs
	$(Q)$(SCRIPTS)/shell $(BUILD) "" $(SCRIPTS)/demo

# make shell [CONFIG=FILE.yaml] [CMD='...']
CONFIG ?=
CMD    ?=
.PHONY: shell
shell: packages
	$(Q)$(MAKE) --no-print-directory programs
	$(Q)$(SCRIPTS)/shell $(BUILD) '$(CONFIG)' '$(subst ','"'"',$(CMD))'

.PHONY: check
check: packages
	$(Q)$(MAKE) --no-print-directory check-layers programs tests
	$(Q)tests/check-semantics
	$(Q)tests/check-units $(BUILD)
	$(Q)LEAT_TEST_MODEL="$$($(SCRIPTS)/fetch-model)" tests/run-tests $(BUILD)

# Many clients at once on a daemon for ten minutes, half of them on a simulated GPU that is too small, then an hour of random programs on the
# cache, over all shapes and forms, every pair of codecs at every head size, and every fault (several hours of processor time by themselves;
# LEAT_SOAK_SLICES=N LEAT_FAULT_SEED=I takes the I-th of N parts); seeds are printed.  make soak SOAK_SECONDS=600
SOAK_SECONDS ?= 3600
soak_small    = OPENCL_LAYERS=$(abspath $(SIM)) CLSIM_MEMORY=8M CLSIM_MAX_ALLOCATION=8M CLSIM_LINK_RATE=500M CLSIM_LATENCY_USEC=50 CLSIM_CHECK=all \
                CLSIM_PART=1 CLSIM_POISON=1 CLSIM_MISUSE=99 POCL_MAX_PTHREAD_COUNT=1 LEAT_SOAK_TIGHT=1
.PHONY: soak
soak: packages
	$(Q)$(MAKE) --no-print-directory programs sim $(BUILD)/tests/parity/test-cache-random $(BUILD)/tests/parity/test-attend-values \
	  $(BUILD)/tests/bus/test-bus-soak $(FAULT_TESTS)
	$(Q)export LEAT_TEST_DATA=tests/data LEAT_TEST_CACHE=$${LEAT_TEST_CACHE:-$(abspath $(BUILD))/test-cache} && \
	  small=$$LEAT_TEST_CACHE/sim && mkdir -p $$small/sim-arguments && status=0; \
	  LEAT_SOAK_SECONDS=$$(($(SOAK_SECONDS) / 12)) $(BUILD)/tests/bus/test-bus-soak || status=1; \
	  LEAT_TEST_CACHE=$$small POCL_CACHE_DIR=$$small/pocl CLSIM_ARGUMENTS=$$small/sim-arguments $(soak_small) \
	    LEAT_SOAK_SECONDS=$$(($(SOAK_SECONDS) / 12)) $(BUILD)/tests/bus/test-bus-soak || status=1; \
	  LEAT_RANDOM_WIDE=1 LEAT_RANDOM_SECONDS=$(SOAK_SECONDS) \
	  LEAT_RANDOM_SEED=$${LEAT_RANDOM_SEED:-$$(date +%s)} $(BUILD)/tests/parity/test-cache-random || status=1; \
	  LEAT_SOAK=1 $(BUILD)/tests/parity/test-attend-values || status=1; \
	  LEAT_SOAK=1 LEAT_TEST_ONLY=faults tests/run-tests $(BUILD) || status=1; exit $$status

# Damaged files of every kind, read with the sanitizers' eyes; the seed is printed.  make fuzz FUZZ_SECONDS=3600
FUZZ_SECONDS ?= 60
FUZZ_BUILD   := $(BUILD)/sanitize-address-undefined
.PHONY: fuzz
fuzz: packages
	$(Q)$(MAKE) --no-print-directory SANITIZE=address,undefined $(FUZZ_BUILD)/tests/unit/test-fuzz
	$(Q)mkdir -p $(FUZZ_BUILD)/fuzz
	$(Q)LEAT_TEST_DATA=tests/data LEAT_FUZZ_SECONDS=$(FUZZ_SECONDS) LEAT_FUZZ_SEED=$${LEAT_FUZZ_SEED:-$$(date +%s)} \
	  LEAT_FUZZ_KEEP=$(FUZZ_BUILD)/fuzz $(FUZZ_BUILD)/tests/unit/test-fuzz

# Includes go down only: daemon -> cache -> opencl -> quant; inside daemon: bus -> engine -> {model, text}.
.PHONY: check-layers
check-layers:
	$(Q)tests/check-layers

.PHONY: bench
bench: packages
	$(Q)$(MAKE) --no-print-directory programs benches sim
	$(Q)tests/bench/run-bench $(BUILD)

.PHONY: benches
benches: $(BENCHES)

.PHONY: clean
clean:
	$(Q)rm -rf $(BUILD)

.PHONY: help
help:
	@printf '%s\n' \
	  'make                    leatd and leat, in $(BUILD)/' \
	  'make demo               from nothing to an answer: packages, build, model, daemon, one table' \
	  "make shell [CMD='...']  a private bus with the daemon, leat on PATH [CONFIG=FILE.yaml]" \
	  'make check              all set-up and every test  [SANITIZE=address,undefined]' \
	  "make test T=NAME [F='*pattern*']  one test program" \
  'make soak               clients on a daemon, random programs, every codec pair, every fault (hours)  [SOAK_SECONDS=3600]' \
	  'make fuzz               damaged sessions, models, YAML, templates, under sanitizers  [FUZZ_SECONDS=60]' \
	  'make sim                the simulated small GPU, a layer for the OpenCL loader (tests/sim/README.md)' \
  'make bench              ratios against llama.cpp, in one run on a quiet machine' \
	  'make install            [DESTDIR=] [PREFIX=/usr] [SYSCONFDIR=/etc]' \
	  'make clean   make check-layers   V=1 shows commands   DEVELOPER=0 without -Werror'

# ---- install ---------------------------------------------------------------------------------------------------------------------

bindir         := $(PREFIX)/bin
unitdir        ?= $(shell $(PKG_CONFIG) --variable=systemdsystemunitdir systemd 2>/dev/null || echo /lib/systemd/system)
userunitdir    ?= $(PREFIX)/lib/systemd/user
sysusersdir    ?= $(PREFIX)/lib/sysusers.d
tmpfilesdir    ?= $(PREFIX)/lib/tmpfiles.d
dbusdir        := $(PREFIX)/share/dbus-1
mandir         := $(PREFIX)/share/man
fill            = sed -e 's|@bindir@|$(bindir)|g'

.PHONY: install
install: programs
	install -d $(addprefix $(DESTDIR),$(bindir) $(unitdir) $(userunitdir) $(sysusersdir) $(tmpfilesdir) $(SYSCONFDIR)/leat/services.d \
	  $(SYSCONFDIR)/leat/leat.d $(dbusdir)/system.d $(dbusdir)/system-services $(dbusdir)/services $(dbusdir)/interfaces \
	  $(mandir)/man1 $(mandir)/man5 $(mandir)/man8)
	install -m 755 $(BUILD)/leat $(BUILD)/leatd $(DESTDIR)$(bindir)/
	$(fill) packaging/systemd/leatd.service > $(DESTDIR)$(unitdir)/leatd.service
	$(fill) packaging/systemd/leat@.service > $(DESTDIR)$(unitdir)/leat@.service
	install -m 644 packaging/systemd/leat@.timer $(DESTDIR)$(unitdir)/
	$(fill) packaging/systemd/leatd-user.service > $(DESTDIR)$(userunitdir)/leatd.service
	install -m 644 packaging/systemd/leat.sysusers $(DESTDIR)$(sysusersdir)/leat.conf
	install -m 644 packaging/systemd/leat.tmpfiles $(DESTDIR)$(tmpfilesdir)/leat.conf
	install -m 644 packaging/dbus/org.leat.Inference1.conf $(DESTDIR)$(dbusdir)/system.d/
	install -m 644 packaging/dbus/org.leat.Inference1.service $(DESTDIR)$(dbusdir)/system-services/
	$(fill) packaging/dbus/org.leat.Inference1.session.service > $(DESTDIR)$(dbusdir)/services/org.leat.Inference1.service
	install -m 644 packaging/dbus/org.leat.Inference1.xml $(DESTDIR)$(dbusdir)/interfaces/
	install -m 644 etc/leat.yaml $(DESTDIR)$(SYSCONFDIR)/leat/
	install -m 644 etc/services.d/*.yaml $(DESTDIR)$(SYSCONFDIR)/leat/services.d/
	install -m 644 packaging/man/leat.1 $(DESTDIR)$(mandir)/man1/
	install -m 644 packaging/man/leat.yaml.5 $(DESTDIR)$(mandir)/man5/
	install -m 644 packaging/man/leatd.8 $(DESTDIR)$(mandir)/man8/

.PRECIOUS: $(BUILD)/%.o
-include $(shell find $(BUILD) -name '*.d' 2>/dev/null)
