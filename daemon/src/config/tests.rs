use std::net::IpAddr;

use tempfile::TempDir;

use super::*;
use crate::address::{AdvertiseAddress, check_advertise, check_listen};

crate::choices! {
    /// Which part is evicted first.
    enum Policy {
        /// The one used longest ago.
        Lru = "lru",
        /// The one used least for its size.
        Gdsf = "gdsf",
    }
}

crate::settings! {
    /// A node, with a key of every shape.
    struct Sample {
        /// Allows binds beyond loopback without TLS.
        insecure: bool = false,
        /// Where others reach the masters.
        masters: Vec<String> = vec!["127.0.0.1:7400".to_owned()],
        /// Most requests at a time.
        max_requests: u32 = 64,
        /// How long a stop may take.
        stop_grace: HumanDuration = HumanDuration::from_secs(10),
        /// Memory.
        dram: Dram,
        /// The data plane.
        data: Data,
        /// Disks.
        ssd: Ssd,
        /// Certificates.
        tls: Tls,
        /// Logs.
        log: LogConfig,
    }
}

crate::settings! {
    /// Memory.
    struct Dram {
        /// Host memory for parts.
        capacity: ByteSize = ByteSize::gib(2),
        /// Eviction starts above this share.
        high_watermark: f64 = 0.95,
        /// Eviction stops below this share.
        low_watermark: f64 = 0.90,
        /// What goes first.
        policy: Policy = Policy::Lru,
        /// NUMA node.
        numa_node: Option<u16>,
    }
}

crate::settings! {
    /// The data plane.
    struct Data {
        /// Where to listen.
        listen: ListenAddress = ListenAddress::loopback(7402),
        /// What to announce.
        advertise: Option<AdvertiseAddress>,
        /// Only peers from here.
        peers: Vec<IpAddr>,
    }
}

crate::settings! {
    /// Disks.
    struct Ssd {
        /// One path each.
        path: Vec<SsdPath>,
    }
}

crate::settings! {
    /// One disk.
    struct SsdPath {
        /// Folder.
        dir: PathBuf,
        /// Mandatory.
        capacity: Option<ByteSize>,
        /// Share of writes.
        weight: u16 = 1,
    }
}

crate::settings! {
    /// Certificates.
    struct Tls {
        /// Certificate.
        certificate: Option<PathBuf>,
        /// Its key.
        key: Option<PathBuf>,
    }
}

impl DaemonConfig for Sample {
    const KIND: DaemonKind = DaemonKind::Node;
    const ABOUT: &'static str = "Keeps KV blocks and gives them to peers";

    fn validate(&self, rules: &mut Rules<'_>) {
        let Dram { capacity, high_watermark, low_watermark, .. } = &self.dram;
        rules.key("dram.capacity").must(*capacity >= ByteSize::mib(16), "be at least 16MiB");
        rules
            .key("dram.high_watermark")
            .must(*high_watermark > 0.0 && *high_watermark <= 1.0, "be above 0 and at most 1");
        rules
            .key("dram.low_watermark")
            .must(low_watermark < high_watermark, "be below dram.high_watermark");
        for (index, path) in self.ssd.path.iter().enumerate() {
            rules
                .key(format!("ssd.path[{index}].capacity"))
                .must(path.capacity.is_some(), "be given, so that the disk cannot fill up");
            rules.key(format!("ssd.path[{index}].weight")).must(path.weight > 0, "be above 0");
        }
        let Tls { certificate, key } = &self.tls;
        let origin = rules.origin("tls.certificate");
        rules.key("tls.key").must(
            certificate.is_none() || key.is_some(),
            format!("be given together with tls.certificate ({origin})"),
        );
        let Data { listen, advertise, .. } = &self.data;
        check_listen(rules, "data.listen", listen, certificate.is_some(), self.insecure);
        check_advertise(rules, "data.advertise", advertise.as_ref(), "data.listen", listen);
    }

    fn process(&self) -> ProcessSettings<'_> {
        ProcessSettings { log: &self.log, metrics_listen: None, stop_grace: self.stop_grace.get() }
    }
}

/// A start in a folder of its own.
struct Start {
    folder: TempDir,
    args: Vec<String>,
    environment: Vec<(String, String)>,
}

impl Start {
    fn new() -> Self {
        let args = vec!["larder-node".to_owned()];
        Self { folder: TempDir::new().unwrap(), args, environment: Vec::new() }
    }

    fn file(mut self, text: &str) -> Self {
        let path = self.folder.path().join("node.toml");
        fs::write(&path, text).unwrap();
        self.args.extend(["--config".to_owned(), path.to_str().unwrap().to_owned()]);
        self
    }

    fn variable(mut self, name: &str, value: &str) -> Self {
        self.environment.push((name.to_owned(), value.to_owned()));
        self
    }

    fn args(mut self, args: &[&str]) -> Self {
        self.args.extend(args.iter().map(|&arg| arg.to_owned()));
        self
    }

    fn load(&self) -> Result<Command<Sample>, ConfigError> {
        let environment = self.environment.iter();
        load(&Sources {
            args: self.args.iter().map(OsString::from).collect(),
            environment: environment.map(|(name, value)| (name.into(), value.into())).collect(),
        })
    }

    fn run(&self) -> Effective<Sample> {
        match self.load() {
            Ok(Command::Run(effective)) => effective,
            other => panic!("{other:?}"),
        }
    }

    fn printed(&self) -> String {
        match self.load() {
            Ok(Command::Print(text)) => self.without_folder(&text),
            other => panic!("{other:?}"),
        }
    }

    /// What a start says when it is refused. `--check-config` has to say the same.
    fn refusal(self) -> String {
        let start = self.load().unwrap_err().to_string();
        let check = self.args(&["--check-config"]);
        assert_eq!(check.load().unwrap_err().to_string(), start);
        check.without_folder(&start)
    }

    fn without_folder(&self, text: &str) -> String {
        text.replace(&format!("{}/", self.folder.path().display()), "")
    }
}

#[test]
fn nothing_given_means_the_defaults() {
    let effective = Start::new().run();
    assert_eq!(effective.config, Sample::default());
    assert_eq!(effective.origin("dram.capacity"), Origin::Default);
    assert!(effective.warnings.is_empty());
}

#[test]
fn a_flag_beats_a_variable_beats_the_file_beats_the_default() {
    let file = "[dram]\ncapacity = \"1GiB\"\nhigh_watermark = 0.8\nlow_watermark = 0.5\n";
    let effective = Start::new()
        .file(file)
        .variable("LARDER_NODE__DRAM__CAPACITY", "3GiB")
        .variable("LARDER_NODE__DRAM__HIGH_WATERMARK", "0.7")
        .args(&["--dram.capacity", "4GiB"])
        .run();
    let Dram { capacity, high_watermark, low_watermark, policy, .. } = effective.config.dram;
    assert_eq!((capacity, high_watermark), (ByteSize::gib(4), 0.7));
    assert_eq!((low_watermark, policy), (0.5, Policy::Lru));
    assert_eq!(effective.origin("dram.capacity").to_string(), "from --dram.capacity");
    assert!(effective.origin("dram.low_watermark").to_string().ends_with("node.toml:4"));
}

// F45: an unknown setting was only a quiet warning, and start-up failed much later.

#[test]
fn an_unknown_key_is_refused_with_its_line_and_the_nearest_name() {
    let refusal = Start::new().file("[dram]\n\ncapcity = \"4GiB\"\n").refusal();
    assert_eq!(
        refusal,
        "dram.capcity (from node.toml:3): unknown key; did you mean dram.capacity?"
    );
    let refusal = Start::new().file("capacity = \"4GiB\"").refusal();
    assert_eq!(refusal, "capacity (from node.toml:1): unknown key; did you mean dram.capacity?");
    let refusal = Start::new().file("\n[drum]\ncapacity = \"4GiB\"").refusal();
    assert_eq!(refusal, "drum (from node.toml:2): unknown table; did you mean dram?");
    let refusal = Start::new().file("[[ssd.path]]\ncapcity = \"4GiB\"").refusal();
    assert!(refusal.contains("unknown key; did you mean ssd.path[0].capacity?"), "{refusal}");
}

#[test]
fn a_value_of_the_wrong_type_is_refused_with_the_accepted_form() {
    let refusal = Start::new().file("max_requests = \"many\"\n[dram]\npolicy = \"fifo\"").refusal();
    assert_eq!(
        refusal,
        "dram.policy = \"fifo\" (from node.toml:3): must be one of lru, gdsf\n\
         max_requests = \"many\" (from node.toml:1): must be a whole number from 0 to 4294967295"
    );
    let refusal = Start::new().file("dram = 4\ndata.listen = [1]\nssd.path = \"/a\"").refusal();
    assert_eq!(
        refusal,
        "data.listen = [1] (from node.toml:2): must be an address to listen on, like \
         127.0.0.1:7400 or [::1]:7400\n\
         dram = 4 (from node.toml:1): must be a table\n\
         ssd.path = \"/a\" (from node.toml:3): must be a list of tables, like [{dir = ..., capacity = ..., weight = ...}]"
    );
}

#[test]
fn a_value_out_of_range_is_refused_wherever_it_came_from() {
    let start = Start::new().variable("LARDER_NODE__DRAM__LOW_WATERMARK", "0.97");
    assert_eq!(
        start.refusal(),
        "dram.low_watermark = 0.97 (from LARDER_NODE__DRAM__LOW_WATERMARK): \
         must be below dram.high_watermark"
    );
    let start = Start::new().args(&["--dram.high_watermark=1.5"]);
    assert_eq!(
        start.refusal(),
        "dram.high_watermark = 1.5 (from --dram.high_watermark): must be above 0 and at most 1"
    );
    let start = Start::new().file("dram.high_watermark = nan");
    assert!(start.refusal().starts_with("dram.high_watermark = nan (from node.toml:1)"));
    let start = Start::new().file("max_requests = 99999999999");
    assert!(start.refusal().contains("must be a whole number from 0 to 4294967295"));
    let start = Start::new().file("max_requests = 99999999999999999999");
    assert!(start.refusal().contains("max_requests"));
}

#[test]
fn a_setting_without_its_partner_is_refused_and_both_are_named() {
    let refusal = Start::new().file("[tls]\ncertificate = \"/etc/cert.pem\"").refusal();
    assert_eq!(
        refusal,
        "tls.key is not set: must be given together with tls.certificate (from node.toml:2)"
    );
    let refusal = Start::new().file("[[ssd.path]]\ndir = \"/a\"\nweight = 0").refusal();
    assert_eq!(
        refusal,
        "ssd.path[0].capacity is not set: must be given, so that the disk cannot fill up\n\
         ssd.path[0].weight = 0 (from node.toml:3): must be above 0"
    );
}

#[test]
fn a_bare_number_is_no_size_and_no_duration() {
    let size = "must be a size with a unit (B, KiB, MiB, GiB or TiB), like 8GiB or 512MiB";
    let refusal = Start::new().file("[dram]\ncapacity = 8").refusal();
    assert_eq!(refusal, format!("dram.capacity = 8 (from node.toml:2): {size}"));
    let refusal = Start::new().variable("LARDER_NODE__DRAM__CAPACITY", "8").refusal();
    assert_eq!(
        refusal,
        format!("dram.capacity = \"8\" (from LARDER_NODE__DRAM__CAPACITY): {size}")
    );
    let refusal = Start::new().args(&["--stop_grace", "5"]).refusal();
    assert!(refusal.contains("must be a duration with a unit, like 250ms, 5s or 10m"), "{refusal}");
}

#[test]
fn all_that_is_wrong_is_told_at_once() {
    let refusal = Start::new()
        .file("capcity = 1")
        .variable("LARDER_NODE__DRAM__CAPACITY", "8")
        .args(&["--stop_grace=soon"])
        .refusal();
    assert_eq!(refusal.lines().count(), 3, "{refusal}");

    let refusal = Start::new().file("capcity = 1\ndram.low_watermark = 0.99").refusal();
    assert_eq!(refusal.lines().count(), 2, "rules are checked beside unknown keys: {refusal}");
}

#[test]
fn misspelt_variables_are_refused_and_those_of_others_are_not() {
    let refuse = |name: &str| Start::new().variable(name, "1GiB").refusal();
    let meant = "did you mean LARDER_NODE__DRAM__CAPACITY?";
    for name in [
        "LARDER_NODE__DRAM__CAPCITY",
        "LARDER_NOED__DRAM__CAPACITY",
        "LARDER_NODE_DRAM_CAPACITY",
        "LARDER_NODE__DRAM_CAPACITY",
        "LARDER_DRAM__CAPACITY",
    ] {
        assert_eq!(refuse(name), format!("{name}: unknown variable; {meant}"));
    }

    let mut start = Start::new();
    for name in [
        "LARDER_MASTER__LISTEN",
        "LARDER_CACHE_DIR",
        "LARDER_NODE_PORT",
        "LARDER_NODE_PORT_7402_TCP_ADDR",
        "LARDER_NODE_SERVICE_HOST",
        "LARDERX",
        "PATH",
    ] {
        start = start.variable(name, "x");
    }
    assert_eq!(start.run().config, Sample::default());
}

#[test]
fn unknown_flags_and_arguments_are_refused_with_the_nearest_name() {
    let refuse = |arg: &str| Start::new().args(&[arg]).load().unwrap_err().to_string();
    assert_eq!(
        refuse("--dram.capcity=4GiB"),
        "--dram.capcity: unknown flag; did you mean --dram.capacity?"
    );
    assert_eq!(
        refuse("--chek-config"),
        "--chek-config: unknown flag; did you mean --check-config?"
    );
    assert_eq!(refuse("start"), "start: unknown argument; --help lists what exists");
    assert_eq!(
        refuse("--dram.capacity"),
        "a value is required for '--dram.capacity <SIZE>' but none was supplied"
    );
}

#[test]
fn unknown_keys_and_variables_can_be_allowed_for_a_rollback() {
    let effective = Start::new()
        .file("[dram]\nfuture = 1\ncapacity = \"1GiB\"\n[future]\nkey = 1")
        .variable("LARDER_NODE__FUTURE__KEY", "1")
        .args(&["--allow-unknown-keys"])
        .run();
    assert_eq!(effective.config.dram.capacity, ByteSize::gib(1));
    let warnings: Vec<_> = effective.warnings.iter().map(ToString::to_string).collect();
    assert_eq!(warnings.len(), 3, "{warnings:?}");

    let refusal =
        Start::new().file("[dram]\ncapacity = 8").args(&["--allow-unknown-keys"]).refusal();
    assert!(refusal.contains("dram.capacity"), "what is known is checked all the same: {refusal}");
}

#[test]
fn a_named_file_must_exist_and_must_be_toml() {
    let missing = Start::new().args(&["--config", "/nonexistent/node.toml"]).refusal();
    assert_eq!(missing, "read /nonexistent/node.toml: No such file or directory (os error 2)");
    let broken = Start::new().file("[dram]\ncapacity = \n").refusal();
    assert!(broken.starts_with("node.toml:2: "), "{broken}");
    let twice = Start::new().file("[dram]\n[data]\n[dram]\n").refusal();
    assert!(twice.starts_with("node.toml:3: "), "{twice}");
}

#[test]
fn lists_and_optional_keys_can_be_given_by_every_source() {
    let effective = Start::new()
        .file("[dram]\nnuma_node = 1\n[data]\npeers = [\"10.0.0.1\"]")
        .variable("LARDER_NODE__DRAM__NUMA_NODE", "")
        .variable("LARDER_NODE__DATA__PEERS", "10.0.0.2, ::1")
        .variable("LARDER_NODE__SSD__PATH", "[{ dir = \"/a\", capacity = \"1TiB\" }]")
        .args(&["--masters", "a:1", "--masters", "b:2", "--insecure"])
        .run();
    let Sample { insecure, masters, dram, data, ssd, .. } = &effective.config;
    assert!(insecure);
    assert_eq!(dram.numa_node, None, "an empty text takes back what the file gave");
    assert_eq!(masters, &["a:1", "b:2"]);
    assert_eq!(data.peers, ["10.0.0.2".parse::<IpAddr>().unwrap(), "::1".parse().unwrap()]);
    assert_eq!((ssd.path[0].capacity, ssd.path[0].weight), (Some(ByteSize::kib(1 << 30)), 1));
    assert_eq!(effective.origin("ssd.path[0].dir").to_string(), "from LARDER_NODE__SSD__PATH");

    let start = Start::new().args(&["--masters", "[\"a,b\"]", "--insecure", "false"]);
    assert_eq!(start.run().config.masters, ["a,b"]);
    assert!(!start.run().config.insecure);
}

#[test]
fn an_entry_of_a_list_comes_from_where_its_list_does() {
    let effective = Start::new().args(&["--masters=nohost"]).run();
    assert_eq!(effective.origin("masters[0]").to_string(), "from --masters");
    let effective = Start::new().file("[[ssd.path]]\ncapacity = \"1GiB\"").run();
    assert_eq!(effective.origin("ssd.path[0].weight"), Origin::Default);
}

#[test]
fn a_list_replaces_the_list_below_it_with_all_its_origins() {
    let effective = Start::new()
        .file("[[ssd.path]]\ncapacity = \"1GiB\"\n[[ssd.path]]\ncapacity = \"2GiB\"\nweight = 7")
        .args(&["--ssd.path", "[{ capacity = \"3GiB\" }]"])
        .run();
    assert_eq!(effective.config.ssd.path.len(), 1);
    assert_eq!(effective.config.ssd.path[0].weight, 1);
    assert_eq!(effective.origin("ssd.path[1].weight"), Origin::Default);

    let refusal = Start::new().args(&["--ssd.path", "/a"]).refusal();
    assert_eq!(
        refusal,
        "ssd.path = \"/a\" (from --ssd.path): must be a list of tables, like [{dir = ..., capacity = ..., weight = ...}]"
    );
}

#[test]
fn the_printed_configuration_names_origins_and_reads_back_as_the_same() {
    let file = "insecure = true\n[[ssd.path]]\ndir = \"/a\"\ncapacity = \"1024MiB\"\n";
    let start = Start::new()
        .file(file)
        .variable("LARDER_NODE__DATA__LISTEN", "[::1]:0")
        .args(&["--dram.capacity", "4GiB"]);
    let config = start.run().config;
    let printed = start.args(&["--print-config"]).printed();
    assert!(printed.contains("insecure = true  # from node.toml:1\n"), "{printed}");
    assert!(printed.contains("[dram]\ncapacity = \"4GiB\"  # from --dram.capacity\n"), "{printed}");
    assert!(printed.contains("high_watermark = 0.95\n"), "{printed}");
    assert!(printed.contains("numa_node = \"\"  # not set\n"), "{printed}");
    assert!(printed.contains("listen = \"[::1]:0\"  # from LARDER_NODE__DATA__LISTEN\n"));
    assert!(printed.contains("[[ssd.path]]\ndir = \"/a\"  # from node.toml:3\n"), "{printed}");
    assert_eq!(Start::new().file(&printed).run().config, config);
}

#[test]
fn check_config_tells_warnings_and_what_is_given() {
    let start = Start::new()
        .file("insecure = true\n[data]\nlisten = \"0.0.0.0:7402\"\nadvertise = \"127.0.0.1:7402\"")
        .args(&["--check-config"]);
    assert_eq!(
        start.printed(),
        "warning: data.advertise = \"127.0.0.1:7402\" (from node.toml:4): must be reachable from \
         other hosts, because data.listen = 0.0.0.0:7402 is\n\
         larder-node: the configuration is right: 3 of 17 settings given, the rest by default; \
         files, ports and memory are tried at the start\n"
    );
}

#[test]
fn the_help_lists_every_key_with_its_text_and_default() {
    let help = Start::new().args(&["--help"]).printed();
    for key in &Schema::of::<Sample>().keys {
        assert!(help.contains(&format!("--{} ", key.path)), "{} is missing:\n{help}", key.path);
    }
    for text in [
        "Host memory for parts. [default: 2GiB]",
        "What goes first. [one of lru, gdsf] [default: lru]",
        "[default: not set]",
        "<SIZE>",
        "[ssd] Disks:",
        "capacity: Mandatory.",
    ] {
        assert!(help.contains(text), "{text:?} is missing:\n{help}");
    }
    let version = Start::new().args(&["--version"]).printed();
    assert_eq!(version, format!("larder-node {}\n", env!("CARGO_PKG_VERSION")));
}

#[test]
fn a_configuration_made_in_code_obeys_the_same_rules() {
    assert!(check_values(&Sample::default()).is_ok());
    let mut config = Sample::default();
    config.dram.capacity = ByteSize::kib(8);
    assert_eq!(
        check_values(&config).unwrap_err().to_string(),
        "dram.capacity = \"8KiB\" (default): must be at least 16MiB"
    );
}

#[test]
#[should_panic(expected = "a rule names dram.capcity, which is no key")]
fn a_rule_about_a_key_that_does_not_exist_is_our_own_mistake() {
    let schema = Schema::of::<Sample>();
    let (values, layer) = (Table::new(), Layer::default());
    Rules::new(&schema, &values, &layer).key("dram.capcity").must(true, "never be read");
}

// F46: the listening address was announced, and nobody could reach it.

#[test]
fn a_wildcard_is_never_announced() {
    let wildcard = "insecure = true\ndata.listen = \"0.0.0.0:7402\"\n";
    let refusal = Start::new().file(wildcard).refusal();
    assert_eq!(
        refusal,
        "data.advertise is not set: must be given, because data.listen = 0.0.0.0:7402 is a \
         wildcard, which nobody can dial"
    );
    for advertise in ["0.0.0.0:7402", "[::]:7402", "[::ffff:0.0.0.0]:7402"] {
        let refusal = Start::new().file(wildcard).args(&["--data.advertise", advertise]).refusal();
        assert!(refusal.contains("must be an address that others can dial"), "{refusal}");
    }
    let start = Start::new().file(wildcard).args(&["--data.advertise", "10.0.0.1:7402"]);
    assert!(start.run().warnings.is_empty());
}

#[test]
fn a_bind_beyond_loopback_needs_insecure_or_tls() {
    for listen in ["10.0.0.1:7402", "[fe80::1]:7402"] {
        let refusal = Start::new().args(&["--data.listen", listen]).refusal();
        assert!(
            refusal.contains("must be a loopback address, because there is no TLS"),
            "{refusal}"
        );
        Start::new().args(&["--data.listen", listen, "--insecure"]).run();
    }
    for listen in ["127.0.0.1:0", "127.8.0.1:1", "[::1]:7402", "localhost:7402"] {
        Start::new().args(&["--data.listen", listen]).run();
    }
    let refusal = Start::new().args(&["--data.listen", "no-such-host.invalid:1"]).refusal();
    assert!(refusal.contains("must be an address of this host: "), "{refusal}");
}
