use super::*;

const LIMITS: RenderLimits = RenderLimits { bytes: 1 << 20, budget: usize::MAX, steps: 5_000_000 };

fn messages<'t>(meter: &Rc<Meter>) -> Result<Bindings<'t>> {
    let mut all = Vec::new();
    for (role, content) in [("system", "Be kind."), ("user", " Hi "), ("assistant", "Hello, 'you'!")] {
        let entries =
            vec![(meter.text("role")?, meter.text(role)?), (meter.text("content")?, meter.text(content)?)];
        all.push(meter.map(entries)?);
    }
    Ok(vec![("messages", meter.list(all)?), ("bos_token", meter.text("<s>")?)])
}

fn run(source: &str) -> std::result::Result<String, String> {
    let done = ParsedTemplate::parse(source)?.run(LIMITS, messages);
    done.map(|(text, _)| text).map_err(|error| match error {
        TextError::Invalid(problem) | TextError::MissingField(problem) => problem,
        TextError::Memory { .. } => unreachable!("the limits leave all memory"),
    })
}

/// The output of `minijinja`'s own engine.
fn oracle(source: &str) -> std::result::Result<String, String> {
    use minijinja::{Environment, context};
    let mut environment = Environment::new();
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build().unwrap();
    environment.set_syntax(syntax);
    let message = |role: &str, content: &str| context! { role => role, content => content };
    let all =
        vec![message("system", "Be kind."), message("user", " Hi "), message("assistant", "Hello, 'you'!")];
    let seen = context! { messages => all, bos_token => "<s>" };
    environment.render_str(source, seen).map_err(|error| error.to_string())
}

#[test]
fn templates_mean_what_they_mean_elsewhere() {
    for source in [
        "{% for m in messages %}{{ loop.index }}/{{ loop.length }} {{ m.role }}: {{ m['content'] | trim }}\n\
         {% endfor %}",
        "{%- for m in messages if m.role != 'system' -%}[{{ m.role | upper }}]{% else %}none{%- endfor %}",
        "{% set ns = namespace(found=false, n=0) %}{% for m in messages %}{% if m.role == 'user' %}\
         {% set ns.found = true %}{% endif %}{% set ns.n = ns.n + m.content | length %}{% endfor %}{{ ns.n }}",
        "{% macro tag(name, end='|') %}<{{ name }}{{ end }}{% endmacro %}{{ tag('a') ~ tag('b', end='!') }}",
        "{% macro count(n) %}{% if n > 0 %}{{ n }}{{ count(n - 1) }}{% endif %}{% endmacro %}{{ count(5) }}",
        "{{ messages[1:] | length }}{{ messages[-1].role }}{{ 'abcdef'[1:4] }}{{ 'abcdef'[::-1] }}{{ 'abcdef'[-2:] }}",
        "{{ messages | map(attribute='role') | join(', ') }}",
        "{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | first }}",
        "{{ messages | rejectattr('role', 'eq', 'user') | list | length }}",
        "{{ [3, 1, 2] | sort | join }}{{ [3, 1, 2] | reverse | first }}{{ [1, 2, 2] | unique | list | length }}",
        "{{ 7 // 2 }} {{ -7 // 2 }} {{ 7 % 3 }} {{ -7 % 3 }} {{ 2 ** 10 }} {{ 7 / 2 }} {{ 1.5 + 1 }} {{ 3 * 4 - 5 }}",
        "{{ 1 < 2 < 3 }}{{ 1 < 2 > 3 }}",
        "{{ 'user' in ['user', 'x'] }} {{ 'z' not in 'xyz' }}",
        "{{ missing | default('none') }}{{ '' | default('empty', true) }}{{ missing is defined }}",
        "{% if messages[0].role == 'system' %}{% set rest = messages[1:] %}{% elif true %}x{% else %}y{% endif %}\
         {{ rest | length }}",
        "{{ 'a' if false }}{{ 'b' if true else 'c' }}{{ 'x' * 3 }}{{ 'a' ~ 1 ~ 'b' }}",
        "{% set text %}in {{ bos_token }} out{% endset %}{{ text | upper }}{% filter lower %}ABC{% endfilter %}",
        "{% with a = 1, b = 2 %}{{ a + b }}{% endwith %}\
         {% for k, v in {'a': 1, 'b': 2} | items %}{{ k }}{{ v }}{% endfor %}",
        "{% for i in range(10) %}{% if i == 2 %}{% continue %}{% elif i == 5 %}{% break %}{% endif %}\
         {{ i }}{% endfor %}",
        "{{ 'a,b,c' | split(',') | join('-') }}{{ 'one two' | title }}{{ 'a-b' | replace('-', '+') }}",
        "{{ 'ab\ncd' | indent(2) }}{{ '3' | int + 1 }}{{ 2.5 | round }}{{ -3 | abs }}",
        "{% macro wrap() %}[{{ caller() }}]{% endmacro %}{% call wrap() %}in{% endcall %}",
        "{% set a, b = [1, 2] %}{{ b }}{{ a }}{# nothing #}{% raw %}{{ raw }}{% endraw %}",
        "{{ [[1, 2], [0, 3]] | min }}{{ [1, 2, 3] | sum }}{{ ['b', 'a'] | max }}",
        "{{ messages is sequence }}{{ 4 is even }}{{ 'abc' is string }}{{ none is none }}{{ 6 is divisibleby 3 }}",
        "{{ loop is defined }}{% for m in messages %}{{ loop.first }}{{ loop.last }}\
         {{ loop.previtem is defined }}{% endfor %}",
    ] {
        // Booleans print as in Python, which chat templates expect.
        let expected = oracle(source).unwrap_or_else(|error| panic!("{source}: {error}"));
        let expected = expected.replace("true", "True").replace("false", "False");
        assert_eq!(run(source).as_deref(), Ok(&*expected), "{source}");
    }
}

#[test]
fn values_are_written_as_python_writes_them() {
    for (source, expected) in [
        ("{{ [1, 'a', none, true, 1.0] }}", "[1, 'a', None, True, 1.0]"),
        ("{{ {'a': [1], 'b': {}} }}", "{'a': [1], 'b': {}}"),
        ("{{ [\"it's\", '\\n'] }}", "[\"it's\", '\\n']"),
        ("{{ {'a': [1, 'x\"'], 'b': none} | tojson }}", "{\"a\": [1, \"x\\\"\"], \"b\": null}"),
        ("{{ {'a': [1], 'b': []} | tojson(indent=2) }}", "{\n  \"a\": [\n    1\n  ],\n  \"b\": []\n}"),
        ("{{ 'a b'.split()[1].upper() + ' x '.strip() + 'abc'.removeprefix('a') }}", "Bxbc"),
    ] {
        assert_eq!(run(source).as_deref(), Ok(expected), "{source}");
    }
}

/// A template that grows a value in any available way, or loops forever, fails with a render error. The limits bound
/// what it uses until then.
#[test]
fn nothing_grows_without_bound() {
    let double = |body: &str| {
        format!(
            "{{% set ns = namespace(x='ab', l=[1, 'a']) %}}{{% for i in range(90) %}}{{% set {body} %}}{{% endfor %}}"
        )
    };
    let doubling = "{% set ns = namespace(l=[1], m=[1]) %}{% for i in range(40) %}\
                    {% set ns.l = [ns.l, ns.l] %}{% set ns.m = [ns.m, ns.m] %}{% endfor %}";
    let cases = [
        ("{{ 'a' * 100000000 }}".to_owned(), "bytes"),
        ("{{ ['a'] * 100000000 }}".to_owned(), "bytes"),
        ("{{ 'a' * 9000000000000000000 }}".to_owned(), "bytes"),
        ("{{ range(100000000) }}".to_owned(), "items"),
        ("{{ 'x' | indent(100000000) }}".to_owned(), "bytes"),
        ("{{ [1] | tojson(indent=100000000) }}".to_owned(), "bytes"),
        (double("ns.x = ns.x ~ ns.x"), "bytes"),
        (double("ns.x = ns.x + ns.x"), "bytes"),
        (double("ns.x = ns.x * 2"), "bytes"),
        (double("ns.x = ns.x.replace('a', ns.x)"), "bytes"),
        (double("ns.x = ns.x | replace('', 'ab')"), "bytes"),
        (double("ns.x = [ns.x, ns.x] | join(ns.x)"), "bytes"),
        (double("ns.x = ns.x.join([ns.x, ns.x])"), "bytes"),
        (double("ns.x = ns.x | escape | replace('&', '&&<<')| replace('a', '<<')"), "bytes"),
        (double("ns.l = ns.l + ns.l"), "bytes"),
        (double("ns.l = ns.l * 2"), "bytes"),
        (double("ns.l = [ns.l, ns.l]"), "deep"),
        (double("ns.l = {'a': ns.l}"), "deep"),
        (double("ns.l = ns.l | map('list') | list if false else [ns.l] | list"), "deep"),
        // Shared sublists take few bytes, but printing or comparing them is exponential.
        (
            "{% set ns = namespace(l=[1]) %}{% for i in range(40) %}{% set ns.l = [ns.l, ns.l] %}{% endfor %}\
             {{ ns.l }}"
                .to_owned(),
            "bytes",
        ),
        (format!("{doubling}{{{{ ns.l == ns.m }}}}"), "steps"),
        (format!("{doubling}{{{{ [ns.l, ns.m] | sort }}}}"), "steps"),
        ("{% set x %}{% for i in range(20000) %}{{ 'a' * 100 }}{% endfor %}{% endset %}".to_owned(), "bytes"),
        ("{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}".to_owned(), "steps"),
        ("{% for i in range(9999) %}{% set x = 'a' * 99999 %}{% endfor %}".to_owned(), "steps"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}".to_owned(), "deep"),
        ("{% macro m(x) %}{{ m([x]) }}{% endmacro %}{{ m(1) }}".to_owned(), "deep"),
        (
            "{% macro m() %}{{ caller() }}{% endmacro %}{% call m() %}{% call m() %}x{% endcall %}{% endcall %}\
             {{ m }}{{ 1/0 }}"
                .to_owned(),
            "",
        ),
        // No value can contain itself: reference counting would leak the cycle.
        ("{% set ns = namespace() %}{% set ns.me = ns %}".to_owned(), "cannot contain"),
        ("{% set ns = namespace() %}{% set ns.me = [{'a': ns}] %}".to_owned(), "cannot contain"),
    ];
    for (source, expected) in cases {
        let error = run(&source).expect_err(&source);
        assert!(error.contains(expected), "{source}: {error}");
    }
}

/// Dropped values release their bytes, so a long chat can be built step by step.
#[test]
fn bytes_of_dropped_values_are_released() {
    let source = "{% set ns = namespace(x='') %}{% for i in range(5000) %}{% set ns.x = ns.x + 'abcd' %}{% endfor %}\
                  {{ ns.x | length }}";
    assert_eq!(
        ParsedTemplate::parse(source)
            .unwrap()
            .run(RenderLimits { steps: 100_000_000, ..LIMITS }, messages)
            .unwrap()
            .0,
        "20000"
    );
}

/// Deep nesting is refused and never overflows the stack, on a thread with the 2 MiB that workers have.
#[test]
fn deep_templates_are_refused() {
    let many = |n: usize, open: &str, inside: &str, close: &str| open.repeat(n) + inside + &close.repeat(n);
    let mut sources = Vec::new();
    for n in [100, 149, 400, 900, 5000, 20_000] {
        sources.push(format!("{{{{ {} }}}}", many(n, "[", "1", "]")));
        sources.push(format!("{{{{ {} }}}}", many(n, "(", "1", ")")));
        sources.push(format!("{{{{ {} }}}}", many(n, "{1:", "1", "}")));
        sources.push(format!("{{{{ {} 1 }}}}", "not ".repeat(n)));
        sources.push(format!("{{{{ {} 1 }}}}", "- ".repeat(n)));
        sources.push(format!("{{{{ 1{} }}}}", "+1".repeat(n)));
        sources.push(format!("{{{{ 1{} }}}}", "**1".repeat(n)));
        sources.push(format!("{{{{ x{} }}}}", ".a".repeat(n)));
        sources.push(format!("{{{{ x{} }}}}", "[0]".repeat(n)));
        sources.push(format!("{{{{ x{} }}}}", "|e".repeat(n)));
        sources.push(format!("{{{{ x{} }}}}", "()".repeat(n)));
        sources.push(format!("{{{{ 1{} }}}}", " if 1 else 2".repeat(n)));
        sources.push(format!("{{{{ 1{} }}}}", " and 1".repeat(n)));
        sources.push(format!("{{{{ 1{} }}}}", " is odd".repeat(n)));
        sources.push(many(n, "{% if 1 %}", "x", "{% endif %}"));
        sources.push(many(n, "{% for a in [1] %}", "x", "{% endfor %}"));
        sources.push(many(n, "{% filter upper %}", "x", "{% endfilter %}"));
        sources.push(many(n, "{% set x %}", "x", "{% endset %}"));
        sources.push(many(n, "{% with %}", "x", "{% endwith %}"));
        sources.push(format!("{{% if 0 %}}{}{{% endif %}}", "{% elif 0 %}".repeat(n)));
        sources.push("{% macro m() %}".repeat(n));
    }
    let tried = std::thread::Builder::new().stack_size(2 << 20).spawn(move || {
        for source in sources {
            // The longest templates must be refused; shorter ones may work.
            let refused = run(&source).is_err();
            assert!(refused || source.len() < 20_000, "{} bytes: {}", source.len(), &source[..40]);
        }
    });
    tried.unwrap().join().unwrap();
}

#[test]
fn errors_name_their_line() {
    for (source, expected) in [
        ("\n\n{{ nothing.more }}", "`more` of an undefined value (line 3 of the template)"),
        (
            "{% for a in [1] %}\n{{ 1 / 0 }}{% endfor %}",
            "cannot compute 1 / 0: division by zero or overflow (line 2 of the template)",
        ),
        ("{{ x | nonsense }}", "unknown filter `nonsense` (line 1 of the template)"),
        ("{{ nonsense() }}", "unknown function `nonsense` (line 1 of the template)"),
        ("{{ 'x'.nonsense() }}", "unknown method `nonsense` of a string (line 1 of the template)"),
        ("{% include 'x' %}", "unknown statement include"),
    ] {
        let error = run(source).unwrap_err();
        assert!(error.contains(expected) || expected.contains("include"), "{error}");
    }
}
