//! The screen of `trainer watch`: the charts of `report.html` in characters. Draws a history; reads nothing.

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::symbols::Marker;
use ratatui::text::{Line, Span};
use ratatui::widgets::{Axis, Block, Chart, Dataset, Gauge, GraphType, Paragraph, Wrap};

use super::html::chart;
use super::html::charts;
use super::{event_lines, text};
use crate::base::units::format_count;
use crate::events::event::Event;
use crate::events::{EventRecord, Summary};
use crate::history::{RecordedState, RunHistory};

/// A part of the screen that can be shown alone.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Panel {
    #[default]
    Overview,
    Curves,
    Memory,
    Messages,
}

impl Panel {
    const ALL: [Panel; 4] = [Panel::Overview, Panel::Curves, Panel::Memory, Panel::Messages];

    fn name(self) -> &'static str {
        match self {
            Self::Overview => "overview",
            Self::Curves => "curves",
            Self::Memory => "memory",
            Self::Messages => "messages",
        }
    }
}

/// What the keys selected.
#[derive(Clone, Copy, Debug, Default)]
pub struct Selection {
    pub panel: Panel,
    /// The chart of the curves panel.
    pub curve: usize,
    pub color: bool,
}

impl Selection {
    /// Selects the panel `by` places on, around the end.
    pub fn turn(&mut self, by: isize) {
        let panels = Panel::ALL.len() as isize;
        let at = Panel::ALL.iter().position(|panel| *panel == self.panel).unwrap_or(0) as isize;
        self.panel = Panel::ALL[(at + by).rem_euclid(panels) as usize];
    }

    /// Selects a panel by its number, from 1.
    pub fn select(&mut self, number: usize) {
        self.panel = Panel::ALL.get(number.wrapping_sub(1)).copied().unwrap_or(self.panel);
    }

    /// Draws the run.
    pub fn draw(&self, frame: &mut Frame, run: &RunHistory) {
        let [head, gauge, tabs, main, keys] = Layout::vertical([
            Constraint::Length(2),
            Constraint::Length(1),
            Constraint::Length(1),
            Constraint::Min(3),
            Constraint::Length(1),
        ])
        .areas(frame.area());
        let sentence = Paragraph::new(run.record.sentence()).wrap(Wrap { trim: true });
        frame.render_widget(sentence, head);
        self.draw_progress(frame, gauge, run);
        frame.render_widget(self.tabs(), tabs);
        let runs = std::slice::from_ref(run);
        match self.panel {
            Panel::Overview => self.draw_overview(frame, main, run),
            Panel::Curves => {
                let mut all = charts::metrics(runs);
                all.extend(charts::training(runs));
                let count = all.len().max(1);
                if let Some(chart) = all.get(self.curve % count) {
                    let place = format!(" ({} of {count})", self.curve % count + 1);
                    self.draw_chart(frame, main, chart, &place);
                }
            }
            Panel::Memory => self.draw_memory(frame, main, run),
            Panel::Messages => self.draw_messages(frame, main, run),
        }
        let help = "q quit  tab, 1-4 panel  up, down curve";
        frame.render_widget(Paragraph::new(help).style(Style::new().add_modifier(Modifier::DIM)), keys);
    }

    fn paint(&self, color: Color) -> Style {
        if self.color { Style::new().fg(color) } else { Style::new() }
    }

    fn tabs(&self) -> Line<'static> {
        let tab = |(at, panel): (usize, Panel)| {
            let text = format!(" {} {} ", at + 1, panel.name());
            let selected = Style::new().add_modifier(Modifier::REVERSED);
            Span::styled(text, if panel == self.panel { selected } else { Style::new() })
        };
        Line::from(Panel::ALL.into_iter().enumerate().map(tab).collect::<Vec<_>>())
    }

    fn draw_progress(&self, frame: &mut Frame, area: Rect, run: &RunHistory) {
        let summary = &run.record.summary;
        let done = summary.steps as f64 / summary.total_steps.max(1) as f64;
        let mut label = format!(
            "{} of {} steps ({})",
            format_count(summary.steps),
            format_count(summary.total_steps),
            text::percent(done, 1.0)
        );
        if run.record.state == RecordedState::Running
            && let Some(left) = remaining(summary)
        {
            label += &format!(", {} left", text::duration(left));
        }
        let gauge = Gauge::default().ratio(done.clamp(0.0, 1.0)).label(label);
        frame.render_widget(gauge.gauge_style(self.paint(Color::Cyan)).use_unicode(true), area);
    }

    fn draw_overview(&self, frame: &mut Frame, area: Rect, run: &RunHistory) {
        let runs = std::slice::from_ref(run);
        let [upper, lower] = Layout::vertical([Constraint::Fill(3), Constraint::Fill(1)]).areas(area);
        // Beside each other where there is room, otherwise the loss alone.
        let (loss, memory) = match upper.width >= 100 {
            true => {
                let [loss, memory] =
                    Layout::horizontal([Constraint::Fill(1), Constraint::Fill(1)]).areas(upper);
                (loss, Some(memory))
            }
            false => (upper, None),
        };
        if let Some(chart) = charts::metrics(runs).first() {
            self.draw_chart(frame, loss, chart, "");
        }
        if let Some(area) = memory {
            self.draw_memory(frame, area, run);
        }
        self.draw_messages(frame, lower, run);
    }

    /// Memory over the steps, and how much of the budget the peak takes.
    fn draw_memory(&self, frame: &mut Frame, area: Rect, run: &RunHistory) {
        let charts = charts::memory(std::slice::from_ref(run));
        let summary = &run.record.summary;
        let (peak, resident) = (summary.measured_peak_bytes, summary.resident_peak_bytes);
        let gauges: Vec<(&str, u64, u64)> = [
            ("vram", peak.vram, summary.budget_bytes.vram),
            ("ram", peak.ram.max(resident), summary.budget_bytes.ram),
        ]
        .into_iter()
        .filter(|(_, peak, budget)| peak.max(budget) > &0)
        .collect();
        let mut rows = vec![Constraint::Min(1); charts.len()];
        rows.extend(vec![Constraint::Length(1); gauges.len()]);
        let areas = Layout::vertical(rows).split(area);
        for (chart, area) in charts.iter().zip(areas.iter()) {
            self.draw_chart(frame, *area, chart, "");
        }
        for ((name, peak, budget), area) in gauges.into_iter().zip(areas.iter().skip(charts.len())) {
            let ratio = peak as f64 / budget.max(1) as f64;
            let label = format!(
                "{name}: peak {} of {} budget ({})",
                text::bytes(peak),
                text::bytes(budget),
                text::percent(peak as f64, budget as f64)
            );
            let gauge = Gauge::default().ratio(ratio.clamp(0.0, 1.0)).label(label).use_unicode(true);
            frame.render_widget(gauge.gauge_style(self.paint(Color::Magenta)), *area);
        }
    }

    fn draw_messages(&self, frame: &mut Frame, area: Rect, run: &RunHistory) {
        let width = usize::from(area.width.saturating_sub(2)).max(1);
        let shown = run.messages.iter().filter_map(|message| message_line(message, run));
        let lines: Vec<String> = text::wrap(&shown.collect::<Vec<_>>(), width);
        let room = usize::from(area.height.saturating_sub(2));
        let newest = lines[lines.len().saturating_sub(room)..].iter().map(|line| Line::raw(line.clone()));
        let block = Block::bordered().title("messages");
        frame.render_widget(Paragraph::new(newest.collect::<Vec<_>>()).block(block), area);
    }

    fn draw_chart(&self, frame: &mut Frame, area: Rect, chart: &chart::Chart, place: &str) {
        let ((x0, x1), (y0, y1)) = chart.ranges();
        let points: Vec<Vec<(f64, f64)>> = chart
            .series
            .iter()
            .map(|series| series.points.iter().map(|point| (point.step as f64, point.value)).collect())
            .collect();
        let colors = [Color::Cyan, Color::Yellow, Color::Green, Color::Magenta];
        let style = |at: usize| self.paint(colors[at % colors.len()]);
        let sets = chart.series.iter().zip(&points).enumerate().map(|(at, (series, points))| {
            let (marker, graph) = match series.style {
                chart::Style::Updates => (Marker::Braille, GraphType::Line),
                chart::Style::Limit => (Marker::Dot, GraphType::Line),
                chart::Style::Evaluations | chart::Style::TrainEvaluations => {
                    (Marker::Block, GraphType::Scatter)
                }
            };
            Dataset::default().data(points).marker(marker).graph_type(graph).style(style(at))
        });
        let y_labels = [y0, (y0 + y1) / 2.0, y1].map(|y| chart.unit.format(y));
        let x_labels = [x0, x1].map(|x| format_count(x.max(0.0) as u64));
        // The legend is the title, which covers no value.
        let mut title = vec![Span::raw(format!("{}{place}:", chart.title))];
        for (at, series) in chart.series.iter().enumerate() {
            if let Some(last) = series.points.last() {
                title.push(Span::raw(if title.len() > 1 { ", " } else { " " }));
                let text = format!("{} {}", series.label, chart.unit.format(last.value));
                title.push(Span::styled(text.trim().to_owned(), style(at)));
            }
        }
        let widget = Chart::new(sets.collect())
            .block(Block::bordered().title(Line::from(title)))
            .legend_position(None)
            .x_axis(Axis::default().bounds([x0, x1]).labels(x_labels))
            .y_axis(Axis::default().bounds([y0, y1]).labels(y_labels));
        frame.render_widget(widget, area);
    }
}

/// Seconds until the last step, at the speed so far.
fn remaining(summary: &Summary) -> Option<f64> {
    let left = summary.total_steps.checked_sub(summary.steps)?;
    (summary.steps > 0).then(|| summary.elapsed_s * left as f64 / summary.steps as f64)
}

/// The line that an event gets on the screen; `None` if it gets none.
fn message_line(record: &EventRecord, run: &RunHistory) -> Option<String> {
    let text = match &record.event {
        Event::Started { device, version, .. } => format!("start  on {device}, version {version}"),
        Event::Finished { .. } => format!("end    {}", run.record.sentence()),
        Event::Interrupted { step, signal, .. } => format!("stop   {signal} at step {}", format_count(*step)),
        Event::Diverged { step, loss, .. } => format!("nan    loss {loss} at step {}", format_count(*step)),
        Event::Failed { error, .. } => format!("failed {error}"),
        event => event_lines::explain(event),
    };
    (!text.is_empty()).then_some(text)
}

#[cfg(test)]
mod tests {
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    use super::*;
    use crate::report::fixtures;

    fn screen(width: u16, height: u16, panel: usize) -> String {
        let folder = tempfile::tempdir().unwrap();
        let lines: Vec<String> =
            fixtures::run().iter().map(|record| serde_json::to_string(record).unwrap() + "\n").collect();
        std::fs::write(folder.path().join("events.jsonl"), lines.concat()).unwrap();
        let run = RunHistory::read(folder.path(), 100, None).unwrap().unwrap();
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        let mut selection = Selection::default();
        selection.select(panel);
        terminal.draw(|frame| selection.draw(frame, &run)).unwrap();
        terminal.backend().to_string()
    }

    #[test]
    fn every_panel_fits_every_terminal() {
        for (width, height) in [(1, 1), (20, 8), (60, 20), (100, 30), (180, 50)] {
            for panel in 1..=4 {
                screen(width, height, panel);
            }
        }
    }

    #[test]
    fn the_overview_shows_progress_curves_memory_and_messages() {
        let shown = screen(180, 50, 1);
        for part in [
            "shapes finished after 6 steps",
            "6 of 6 steps (100.0 %)",
            "Loss: update 0.167, valid 0.3",
            "Host memory",
            "ram: peak 209 MiB of 256 MiB budget (81.6 %)",
            "eval step 6 epoch 3 valid.accuracy 0.7000",
        ] {
            assert!(shown.contains(part), "{part}\n{shown}");
        }
    }

    #[test]
    fn panels_turn_around_the_end() {
        let mut selection = Selection::default();
        selection.turn(-1);
        assert_eq!(selection.panel, Panel::Messages);
        selection.turn(1);
        assert_eq!(selection.panel, Panel::Overview);
        selection.select(9);
        assert_eq!(selection.panel, Panel::Overview);
    }
}
